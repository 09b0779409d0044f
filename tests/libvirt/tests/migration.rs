//! Guests that libvirt migrates between two hosts of a cluster, with the hook on both.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use cluster_rig::Network;
use cluster_rig::document::console_lines;
use guest_rig::Form;
use libvirt_rig::document::document;
use libvirt_rig::{DomainXml, Guest, Host, Release};
use tempfile::TempDir;

/// Migrations there and back, by the form of the test.
const ROUND_TRIPS: (u32, u32) = (1, 5);
/// What the guest writes it reads back and compares, over and over.
const VERIFY: &str = "( runs=0
    while [ ! -e /run/stop ]; do
        fio --name=verify --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite \
            --bsrange=512-16k --blockalign=512 --size=8M --fsync=64 --verify=crc32c --verify_fatal=1 \
            --verify_state_save=0 --randrepeat=0 > /run/fio.log 2>&1 || { echo failed > /run/result; exit; }
        runs=$((runs + 1))
    done
    echo $runs > /run/result ) > /dev/null 2>&1 &";

/// A cluster of two hosts with libvirt. Guests are called `web`, as in the document.
struct Pair {
    one: Host,
    two: Host,
    network: Network,
    /// The hosts' files, the guest's among them. QEMU runs as another user.
    _files: TempDir,
}

impl Pair {
    fn start(release: Release) -> Result<Self> {
        let network = Network::new(2)?;
        let files = tempfile::Builder::new()
            .prefix("penstock-libvirt-")
            .tempdir()?;
        std::fs::set_permissions(files.path(), Permissions::from_mode(0o755))?;
        let host = |name, node| {
            let namespace = network.namespace(node);
            Host::on_network(name, release, &namespace, files.path())
        };
        let (mut one, mut two) = (host("one", 1)?, host("two", 2)?);
        let listen = |node| format!("--data /srv/penstock --listen {}", network.address(node));
        one.ok(&format!("penstock init {} --replicas 2", listen(1)))?;
        one.start_penstock()?;
        let token = one.ok("penstock token create --roles meta,storage,host")?;
        two.ok(&format!("penstock join {} {}", token.trim(), listen(2)))?;
        two.start_penstock()?;
        for host in [&mut one, &mut two] {
            host.ok("penstock libvirt hook install")?;
            host.start_libvirt()?;
            host.machine().until_ok("penstock health")?;
        }
        Ok(Self {
            one,
            two,
            network,
            _files: files,
        })
    }

    /// Starts the guest on the first host, with a volume that its socket names, and has it write.
    fn boot(&mut self) -> Result<Guest> {
        self.one.ok("penstock volume create web 64M")?;
        let mut domain = DomainXml::new("web");
        domain.devices = "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw' queues='1'/>\
                          <source type='unix' path='/run/penstock/web.sock'><reconnect enabled='yes' \
                          timeout='1'/></source><target dev='vda' bus='virtio'/></disk>"
            .to_owned();
        self.one.define(&domain)?;
        let mut guest = self.one.boot("web")?;
        guest.sh_until("test -b /dev/vda")?;
        guest.sh(VERIFY)?;
        progress(&mut guest)?;
        Ok(guest)
    }

    fn host(&mut self, number: u8) -> &mut Host {
        match number {
            1 => &mut self.one,
            _ => &mut self.two,
        }
    }

    /// Types the document's command on the host `from`. There is neither ssh nor a name server here.
    fn type_in(&mut self, from: u8, command: &str) -> String {
        let to = self.network.address(3 - from);
        let typed = match from {
            1 => command.replace("two", "TWO"),
            _ => command.replace("one", "TWO"),
        };
        typed.replace(
            "qemu+ssh://TWO/system",
            &format!("qemu+tcp://{to}/system --migrateuri tcp://{to}"),
        )
    }

    /// The domain is on one host, running or not, and so is the attachment.
    fn expect_at(&mut self, at: u8) -> Result<()> {
        let there = self.host(at);
        assert_eq!(there.attached()?, ["/run/penstock/web.sock"]);
        assert_eq!(there.ok("virsh list --name")?.trim(), "web");
        let elsewhere = self.host(3 - at);
        elsewhere.machine().until_ok(
            "test -z \"$(virsh list --all --name | tr -d '\\n')\" && test ! -e /run/penstock/web.sock",
        )?;
        ensure!(elsewhere.attached()?.is_empty());
        Ok(())
    }
}

fn progress(guest: &mut Guest) -> Result<()> {
    guest
        .sh(
            "set -- $(cat /sys/block/vda/stat); before=$(($1 + $5)); for i in $(seq 600); do \
             set -- $(cat /sys/block/vda/stat); test $(($1 + $5)) -gt $((before + 100)) && exit 0; \
             sleep 0.1; done; exit 1",
        )
        .map(drop)
}

fn guest_moves_between_two_hosts(release: Release) -> Result<()> {
    let mut pair = Pair::start(release)?;
    let mut guest = pair.boot()?;
    let lines = console_lines(&document()?, "## Between hosts");
    let find = |words: &str| {
        let line = lines.iter().find(|line| line.command.contains(words));
        let line = line.with_context(|| format!("the document has no {words}"))?;
        assert_eq!(line.prompt, "one");
        Ok::<_, anyhow::Error>(line)
    };
    let (offer, migrate) = (find("attachment offer")?, find("virsh migrate")?);
    let offer_back = offer.command.replace("two", "one");
    let back = migrate.command.replace("two", "one");

    // What a guest of another host uses is not attached here.
    pair.two.define(&DomainXml::new("other"))?;
    let before = pair.two.ok("virsh dumpxml other --inactive")?;
    let told = pair.two.refused("penstock libvirt attach other web")?;
    ensure!(told.contains("detach it there first"), "{told}");
    assert_eq!(pair.two.ok("virsh dumpxml other --inactive")?, before);
    pair.two.ok("virsh undefine other")?;
    pair.expect_at(1)?;

    // Where the disk was not offered to the destination, the guest stays.
    let there = pair.type_in(1, &migrate.command);
    let told = pair.one.fails(&there)?;
    ensure!(
        told.contains("run `penstock attachment offer web --to two`"),
        "{told}"
    );
    progress(&mut guest)?;
    pair.expect_at(1)?;

    // Where the destination cannot serve the disk, it stays, too.
    pair.one.ok(&offer.command)?;
    pair.two.kill_penstock()?;
    let told = pair.one.fails(&there)?;
    ensure!(told.contains("penstock: error: "), "{told}");
    pair.two.start_penstock()?;
    pair.one.machine().until_ok("penstock health")?;
    progress(&mut guest)?;
    pair.expect_at(1)?;

    for _ in 0..Form::of_this_run().pick(ROUND_TRIPS.0, ROUND_TRIPS.1) {
        for (from, offer, command) in [
            (1, &offer.command, &migrate.command),
            (2, &offer_back, &back),
        ] {
            pair.host(from).ok(offer)?;
            let typed = pair.type_in(from, command);
            pair.host(from).ok(&typed)?;
            guest.follow()?;
            progress(&mut guest)?;
            pair.expect_at(3 - from)?;
            let told = pair
                .host(3 - from)
                .json("penstock attachment list --json")?;
            let pause = told[0]["takeover_pause_ms"].as_u64();
            eprintln!(
                "from host {from}: our pause {} ms",
                pause.context("no pause")?
            );
        }
    }
    guest.sh("touch /run/stop")?;
    guest.sh_until("test -e /run/result")?;
    let runs = guest.sh("cat /run/result")?;
    ensure!(
        runs.parse::<u32>().is_ok_and(|runs| runs > 0),
        "fio: {runs}\n{}",
        guest.sh("cat /run/fio.log")?
    );
    guest.expect_no_io_errors()?;

    pair.one.ok("virsh destroy web")?;
    drop(guest);
    ensure!(pair.one.attached()?.is_empty());
    Ok(())
}

#[test]
fn a_guest_is_migrated_by_libvirt_between_two_hosts_and_back() -> Result<()> {
    guest_moves_between_two_hosts(Release::Installed)?;
    match Form::of_this_run() {
        Form::Short => Ok(()),
        Form::Long => guest_moves_between_two_hosts(Release::Debian13).context("on Debian 13"),
    }
}
