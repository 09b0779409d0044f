//! Figures for docs/BENCHMARKS.md: an export beside the same server's export of a disk in the gateway's memory.

use anyhow::{Context, Result};
use gateway_rig::load::Protocol;
use gateway_rig::{ADDRESS, Fleet, GATEWAYS, STORE};

/// Rounds of each, in turn.
const ROUNDS: usize = 3;
/// The server's export of a disk that is not Penstock's.
const LOCAL: &str = "
    d=/run/penstock-gateway/exports/local
    truncate -s 320M /run/local.img && losetup /dev/loop0 /run/local.img && mkfs.xfs -q /dev/loop0
    mkdir -p $d && mount -t xfs /dev/loop0 $d
    exportfs -i -o rw,sync,no_subtree_check,no_root_squash,fsid=00000000-0000-0000-0000-0000000000ff \\
        10.9.0.0/24:$d";
/// What is measured: name, fio's options, and the field of its terse output that has the figure.
const LOADS: [(&str, &str, usize); 4] = [
    (
        "1 MiB writes, KiB/s",
        "--rw=write --bs=1M --end_fsync=1",
        48,
    ),
    ("1 MiB reads, KiB/s", "--rw=read --bs=1M", 7),
    ("4 KiB writes, in 1 s", "--rw=randwrite --bs=4k", 49),
    ("4 KiB reads, in 1 s", "--rw=randread --bs=4k", 8),
];

fn measure(
    fleet: &mut Fleet,
    source: &str,
    protocol: Protocol,
    load: (&str, &str, usize),
) -> Result<f64> {
    let (_, options, field) = load;
    let mount = protocol.options();
    let told = fleet.sh(
        STORE,
        &format!(
            "mount.nfs {source} /mnt -o {mount} && fio --name=f --filename=/mnt/f --size=48M --direct=1 \
             --ioengine=psync --runtime=5 {options} --output-format=terse --terse-version=3 | cut -d';' \
             -f{field}; umount /mnt"
        ),
    )?;
    told.trim()
        .parse()
        .with_context(|| format!("fio printed {told:?}"))
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

#[test]
#[ignore = "figures for docs/BENCHMARKS.md"]
fn nfs_of_a_volume_beside_nfs_of_a_local_disk() -> Result<()> {
    let mut fleet = Fleet::start()?;
    let gateway = GATEWAYS[0];
    fleet.ok(
        gateway,
        "nfs export create data --volume data --size 320M --address 10.9.0.50/24 --no-root-squash",
    )?;
    fleet.sh(gateway, LOCAL)?;
    let sources = [format!("{ADDRESS}:/data"), format!("{ADDRESS}:/local")];
    println!("| | protocol | volume | local disk | ratio |\n|---|---|---:|---:|---:|");
    for protocol in [Protocol::Tcp, Protocol::Rdma] {
        for load in LOADS {
            let mut figures = [Vec::new(), Vec::new()];
            for _ in 0..ROUNDS {
                for (source, figures) in sources.iter().zip(&mut figures) {
                    figures.push(measure(&mut fleet, source, protocol, load)?);
                }
            }
            let [volume, local] = figures.map(median);
            let ratio = volume / local;
            println!(
                "| {} | {} | {volume:.0} | {local:.0} | {ratio:.2} |",
                load.0,
                protocol.name()
            );
        }
    }
    Ok(())
}
