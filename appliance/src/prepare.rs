//! Every boot, before the network is up: the seed is taken if the machine has none yet, and becomes the
//! machine's name, network files, keys and servers of the time. The root is read-only; these are in `/run`,
//! made anew each time, and in `/var/lib/appliance`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::files::replace;
use crate::machine::Machine;
use crate::network;
use crate::process::run;
use crate::seed::{SEED_BYTES_MAX, Seed};

/// Where systemd puts what the hypervisor handed to the machine (systemd.system-credentials(7)).
const CREDENTIAL: &str = "/run/credentials/@system/penstock.seed";
/// A disk of NoCloud, by the label in its filesystem; both spellings are in use.
const SEED_DISKS: &[&str] = &["/dev/disk/by-label/cidata", "/dev/disk/by-label/CIDATA"];
/// Until all disks are there that were there when the machine was switched on.
const SETTLE: Duration = Duration::from_secs(60);
/// Name of a machine that was not told one.
const NAME: &str = "penstock";
const NETWORK_FILES: &str = "/run/systemd/network";
const TIME_FILE: &str = "/run/systemd/timesyncd.conf.d/appliance.conf";
const PUBLIC: u32 = 0o644;

/// Does it. What cannot be done is told, and the rest is done all the same: a machine with a mistake in its
/// seed shall be reachable.
///
/// # Errors
/// The state partition cannot be written, or a part failed.
pub fn prepare(machine: &Machine) -> Result<()> {
    let seed = match seed(machine) {
        Ok(seed) => seed,
        Err(error) => {
            machine.tell(&format!("the seed is refused: {error:#}"));
            Seed::default()
        }
    };
    let name = seed.hostname.as_deref().unwrap_or(NAME);
    let outcomes = [
        rustix::system::sethostname(name.as_bytes()).context("set the machine's name"),
        write_network(&seed),
        write_time(&seed),
        machine.keep_authorized_keys(&seed.ssh_authorized_keys),
        make_host_key(machine),
    ];
    for outcome in outcomes {
        outcome?;
    }
    Ok(())
}

/// The seed that the machine keeps, or the one that it is given and keeps from now on.
fn seed(machine: &Machine) -> Result<Seed> {
    if let Some(seed) = machine.seed()? {
        return Ok(seed);
    }
    match find()? {
        Some((seed, from)) => {
            machine.keep_seed(&seed)?;
            machine.hush();
            eprintln!("penstock: the seed was taken from {from}");
            Ok(seed)
        }
        None => Ok(Seed::default()),
    }
}

/// A seed that was given to the machine, and where it was.
fn find() -> Result<Option<(Seed, String)>> {
    let credential = Path::new(CREDENTIAL);
    if credential.exists() {
        let seed = Seed::parse(&read(credential)?).context("credential penstock.seed")?;
        return Ok(Some((seed, "the credential penstock.seed".to_owned())));
    }
    // A disk that is slow to appear must not be missed; one that hangs must not hold the boot up.
    let settle = format!("--timeout={}", SETTLE.as_secs());
    let _ = run(Command::new("udevadm").args(["settle", &settle]));
    let Some(disk) = SEED_DISKS.iter().map(Path::new).find(|disk| disk.exists()) else {
        return Ok(None);
    };
    let seed = of_disk(disk).with_context(|| format!("seed disk {}", disk.display()))?;
    Ok(Some((
        seed,
        format!("the disk labelled {}", disk.display()),
    )))
}

fn of_disk(disk: &Path) -> Result<Seed> {
    let mount = PathBuf::from("/run/appliance-seed");
    std::fs::create_dir_all(&mount)?;
    let options = ["-o", "ro,nosuid,nodev,noexec"];
    run(Command::new("mount").args(options).arg(disk).arg(&mount))?;
    let seed = (|| {
        let optional = |name: &str| {
            let path = mount.join(name);
            path.exists().then(|| read(&path)).transpose()
        };
        let user = read(&mount.join("user-data"))?;
        Seed::of_nocloud(
            &user,
            optional("meta-data")?.as_deref(),
            optional("network-config")?.as_deref(),
        )
    })();
    // It is read-only: at worst it stays mounted.
    let _ = run(Command::new("umount").arg(&mount));
    seed
}

/// A text of bounded length.
fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    file.take(SEED_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .with_context(|| format!("read {}", path.display()))?;
    ensure!(
        text.len() as u64 <= SEED_BYTES_MAX,
        "{} is longer than 1 MiB",
        path.display()
    );
    Ok(text)
}

fn write_network(seed: &Seed) -> Result<()> {
    let files = match &seed.network {
        Some(network) => network.files(),
        None => vec![("90-appliance.network".to_owned(), network::default_file())],
    };
    let directory = Path::new(NETWORK_FILES);
    if directory.exists() {
        std::fs::remove_dir_all(directory).context("remove the network's files")?;
    }
    files
        .iter()
        .try_for_each(|(name, text)| replace(&directory.join(name), text.as_bytes(), PUBLIC))
}

fn write_time(seed: &Seed) -> Result<()> {
    if seed.ntp.servers.is_empty() {
        return Ok(());
    }
    let text = format!("[Time]\nNTP={}\n", seed.ntp.servers.join(" "));
    replace(Path::new(TIME_FILE), text.as_bytes(), PUBLIC)
}

/// The key by which clients of ssh know this machine again.
fn make_host_key(machine: &Machine) -> Result<()> {
    let key = machine.path("ssh/ssh_host_ed25519_key");
    if key.exists() {
        return Ok(());
    }
    // Made beside and renamed: half a key would keep ssh from starting for ever.
    let partial = machine.path("ssh/new");
    for left in [partial.clone(), partial.with_extension("pub")] {
        let _ = std::fs::remove_file(left);
    }
    std::fs::create_dir_all(machine.path("ssh")).context("make the directory of ssh's key")?;
    run(Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-C", "", "-f"])
        .arg(&partial))?;
    File::open(&partial)?.sync_all()?;
    let public = partial.with_extension("pub");
    std::fs::rename(public, key.with_extension("pub")).context("move ssh's public key")?;
    std::fs::rename(partial, key).context("move ssh's key")
}
