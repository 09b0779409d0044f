//! Configuration and identity of a node: the configuration (a TOML file, overridden by options), its
//! [`identity`], its data directory ([`datadir`]), and the list of daemons of this machine ([`registry`]).

pub mod datadir;
pub mod devices;
pub mod files;
mod filesystem;
pub mod identity;
mod in_force;
mod keys;
mod memory;
mod mistakes;
mod peers;
mod privileges;
pub mod reference;
pub mod registry;
mod sockets;
mod space;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use api::failure::{Failure, Kind, Result, plain_io};
use api::size::Size;
use serde::{Deserialize, Serialize};
use vhost_backend::data_thread::{SPIN_US_DEFAULT, SPIN_US_MAX};
use vhost_backend::memory::budget::Limit;
use vhost_backend::session::socket::PATH_BYTES_MAX;

pub use devices::{DeviceSpec, Preallocation, check_device_size};
pub use in_force::{Origin, Said, Value};
pub use keys::{File, Labels, SizedDevice};
pub use mistakes::mistakes;
pub use peers::{PeerHint, Peers, RoleName, Transport, Wire};
pub use privileges::{Privileges, Sandbox, User};
pub use sockets::SocketAccess;
pub use space::SpaceWarnings;

use mistakes::Mistakes;
use sockets::socket_access;

/// Data threads when nothing is configured: enough for a few busy guests without taking the host's cores.
const THREADS_DEFAULT: usize = 2;
/// More data threads than this are refused: it is a mistake, not a machine.
pub const THREADS_MAX: usize = 256;
/// Environment variable that names the configuration.
const CONFIG_ENV: &str = "PENSTOCK_CONFIG";
/// Longest configuration file that is read, in bytes; a longer one is not a configuration.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Where data go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum StoreKind {
    /// The chunk store on files or block devices.
    File,
    /// Drops every write, and reads give garbage: for benchmarks of the guest side only.
    Null,
}

/// When data threads spin instead of sleeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Poll {
    /// A bounded time after work.
    Adaptive,
    /// Always: each data thread takes a whole core.
    Always,
    /// Never: lowest CPU use, highest latency.
    Never,
}

/// The resolved configuration of a daemon.
#[derive(Debug, Clone)]
pub struct Config {
    /// Data directory.
    pub data: PathBuf,
    /// Admin socket.
    pub admin_socket: PathBuf,
    /// Where Prometheus reads.
    pub metrics_listen: Option<SocketAddr>,
    /// Where data go.
    pub store: StoreKind,
    /// Devices; empty for the default one.
    pub devices: Vec<DeviceSpec>,
    /// Size of the default device file.
    pub device_size: Option<Size>,
    /// How device files get their space at creation.
    pub device_preallocation: Preallocation,
    /// Data threads.
    pub threads: usize,
    /// CPUs to pin them to.
    pub pin: Option<Vec<usize>>,
    /// When they spin.
    pub poll: Poll,
    /// How long, in microseconds.
    pub poll_spin_us: u32,
    /// Owner and mode of attachment sockets.
    pub socket_access: SocketAccess,
    /// Guest memory that is mapped at most.
    pub guest_memory: Limit,
    /// Guest memory that is pinned at most.
    pub pinned_memory: Limit,
    /// Memory for cached file data, in bytes.
    pub filesystem_cache_bytes: u64,
    /// When space of pools is told to be short.
    pub space_warnings: SpaceWarnings,
    /// Who it is, and what it is kept from.
    pub privileges: Privileges,
    /// Network and place among other nodes.
    pub peers: Peers,
    /// Who said what of all this.
    pub said: Said,
}

/// The configuration that is read unless the command names one: the one that the environment variable names
/// (none if that is empty), or the one in the default place, if there is one.
pub fn default_path() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(CONFIG_ENV) {
        return Some(PathBuf::from(named)).filter(|path| !path.as_os_str().is_empty());
    }
    let path = match rustix::process::geteuid().is_root() {
        true => PathBuf::from("/etc/penstock/penstock.toml"),
        false => user_dir("XDG_CONFIG_HOME", ".config")?.join("penstock/penstock.toml"),
    };
    path.exists().then_some(path)
}

/// Reads the file that a command names, or the one that [`default_path`] finds.
pub fn read_named(named: Option<&Path>) -> Result<Option<(PathBuf, File)>> {
    let path = named.map(Path::to_owned).or_else(default_path);
    path.map(|path| read(&path).map(|file| (path, file)))
        .transpose()
}

/// Reads a configuration file.
pub fn read(path: &Path) -> Result<File> {
    parse(&text_of(path)?, &path.display().to_string())
}

/// Reads the text of a configuration file.
fn text_of(path: &Path) -> Result<String> {
    let shown = path.display();
    let unreadable = |e: &std::io::Error| {
        Failure::new(
            Kind::Invalid,
            format!("cannot read config {shown}: {}", plain_io(e)),
            "name a readable TOML file",
        )
    };
    let size = std::fs::metadata(path).map_err(|e| unreadable(&e))?.len();
    if size > CONFIG_BYTES_MAX {
        return Err(Failure::invalid(
            format!("config {shown} is {size} bytes long"),
            format!("a configuration has at most {CONFIG_BYTES_MAX}"),
        ));
    }
    std::fs::read_to_string(path).map_err(|e| unreadable(&e))
}

/// Parses a configuration; `name` is told in errors.
pub fn parse(text: &str, name: &str) -> Result<File> {
    toml::from_str(text).map_err(|e| mistake(text, name, &e))
}

/// Describes a parse error of a configuration, with its line.
fn mistake(text: &str, name: &str, e: &toml::de::Error) -> Failure {
    let line = e
        .span()
        .map(|span| text[..span.start].matches('\n').count() + 1);
    let at = line.map(|l| format!(" line {l}")).unwrap_or_default();
    let message = e.message();
    let hint = if message.starts_with("unknown field") {
        "remove or correct that key"
    } else {
        "correct that value"
    };
    Failure::invalid(
        format!(
            "config {name}{at}: {}",
            message.replace("unknown field", "unknown key")
        ),
        hint,
    )
}

/// Checks a file and fills in defaults. The command line has merged its options into it already.
///
/// # Errors
/// The first mistake of the file.
pub fn resolve(file: File) -> Result<Config> {
    resolve_all(file).map_err(|mistakes| {
        let first = mistakes.into_iter().next();
        first.unwrap_or_else(|| Failure::plain(Kind::Failed, "the configuration cannot be used"))
    })
}

/// Checks a file and fills in defaults.
///
/// # Errors
/// All mistakes of the file, at least one.
fn resolve_all(file: File) -> Result<Config, Vec<Failure>> {
    let mut wrong = Mistakes::default();
    let hints = PeerHint::parse_all(file.peers.as_deref().unwrap_or_default());
    let peers = Peers {
        hints: wrong.keep(hints).unwrap_or_default(),
        ..peers_of(&file)
    };
    check_parts(&file, &peers, &mut wrong);
    let privileges = wrong.keep(Privileges::resolve(&file));
    let access = socket_access(file.socket_mode.as_deref(), file.socket_owner.as_deref());
    let socket_access = wrong.keep(access);
    if let (Some(privileges), Some(access)) = (&privileges, &socket_access) {
        wrong.keep(privileges.check_socket_access(access));
    }
    let data = wrong.keep(data_dir(file.data));
    let threads = wrong.keep(thread_count(file.threads));
    let poll_spin_us = wrong.keep(spin_us(file.poll_spin_us));
    let guest_memory = wrong.keep(memory::limit(
        "guest_memory_max",
        file.guest_memory_max_per_attachment,
        file.guest_memory_max,
    ));
    let pinned_memory = wrong.keep(memory::limit(
        "pinned_memory_max",
        file.pinned_memory_max_per_attachment,
        file.pinned_memory_max,
    ));
    let metrics_listen = wrong.keep(file.metrics_listen.map(metrics_address).transpose());
    let cache = wrong.keep(filesystem::cache_bytes(file.filesystem.as_ref()));
    let warnings = SpaceWarnings::of(file.pool_near_full_percent, file.pool_critical_percent);
    let space_warnings = wrong.keep(warnings);
    wrong.none()?;
    let data = kept(data);
    Ok(Config {
        admin_socket: file.admin_socket.unwrap_or_else(|| admin_socket_in(&data)),
        data,
        metrics_listen: kept(metrics_listen),
        store: file.store.unwrap_or(StoreKind::File),
        devices: file.devices.unwrap_or_default(),
        device_size: file.device_size,
        device_preallocation: file.device_preallocation.unwrap_or(Preallocation::Falloc),
        threads: kept(threads),
        pin: file.pin,
        poll: file.poll.unwrap_or(Poll::Adaptive),
        poll_spin_us: kept(poll_spin_us),
        socket_access: kept(socket_access),
        guest_memory: kept(guest_memory),
        pinned_memory: kept(pinned_memory),
        filesystem_cache_bytes: kept(cache),
        space_warnings: kept(space_warnings),
        privileges: kept(privileges),
        peers,
        said: Said::default(),
    })
}

/// Returns the value of a check, after it is certain that no check failed.
fn kept<T>(value: Option<T>) -> T {
    value.expect("a check without a value added a mistake")
}

fn data_dir(named: Option<PathBuf>) -> Result<PathBuf> {
    let dir = named.map_or_else(default_data_dir, Ok)?;
    Ok(std::path::absolute(&dir).unwrap_or(dir))
}

fn peers_of(file: &File) -> Peers {
    Peers {
        listen: file.listen,
        control_port: file.control_port,
        data_port: file.data_port,
        enrol_port: file.enrol_port,
        wire: file.wire,
        transport: file.transport,
        name: file.name.clone(),
        labels: file.labels.clone().unwrap_or_default(),
        roles: file.roles.clone(),
        hints: Vec::new(),
    }
}

/// Checks values that are used unchanged.
fn check_parts(file: &File, peers: &Peers, wrong: &mut Mistakes) {
    if let Some(pin) = &file.pin {
        wrong.keep(check_pin(pin));
    }
    let devices = file.devices.as_deref().unwrap_or_default();
    let sizes = devices.iter().filter_map(DeviceSpec::size);
    for size in sizes.chain(file.device_size) {
        wrong.keep(check_device_size(size));
    }
    peers.check(wrong);
    if let Some(roles) = &peers.roles {
        wrong.keep(check_roles(roles.contains(&RoleName::Storage), devices));
    }
}

/// Formats a value of the API as in a configuration file. A value that TOML does not support stays JSON.
pub fn as_toml(value: &serde_json::Value) -> String {
    match toml::Value::deserialize(value) {
        Ok(value) => value.to_string(),
        Err(_) => value.to_string(),
    }
}

/// Where the admin socket of a data directory is.
pub fn admin_socket_in(data: &Path) -> PathBuf {
    data.join("penstock.sock")
}

/// `/var/lib/penstock` for root, `$XDG_DATA_HOME/penstock` (or `~/.local/share/penstock`) for others.
pub fn default_data_dir() -> Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from("/var/lib/penstock"));
    }
    user_dir("XDG_DATA_HOME", ".local/share")
        .map(|dir| dir.join("penstock"))
        .ok_or_else(|| {
            Failure::invalid(
                "there is no default data directory: HOME is not set",
                "name one with --data DIR",
            )
        })
}

/// A user's directory by the variable that names it, or below the home directory.
fn user_dir(variable: &str, below_home: &str) -> Option<PathBuf> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
    };
    absolute(variable).or_else(|| absolute("HOME").map(|home| home.join(below_home)))
}

/// Refuses devices of a node that stores no data.
pub fn check_roles(stores_data: bool, devices: &[DeviceSpec]) -> Result<()> {
    match devices.first() {
        Some(device) if !stores_data => Err(Failure::invalid(
            format!(
                "device {} is named for a node without the role storage, which owns no devices",
                device.path().display()
            ),
            "add storage to its roles, or leave the devices out",
        )),
        _ => Ok(()),
    }
}

/// Whether a socket can be made there, as far as the path alone tells: found out before anything is.
pub fn check_admin_socket(path: &Path) -> Result<()> {
    if path.as_os_str().len() <= PATH_BYTES_MAX {
        return Ok(());
    }
    Err(Failure::invalid(
        format!(
            "the path of admin socket {} is too long: {PATH_BYTES_MAX} bytes are allowed",
            path.display()
        ),
        "choose a data directory with a shorter path, or set admin_socket to a shorter one",
    ))
}

fn metrics_address(text: String) -> Result<SocketAddr> {
    text.parse().map_err(|_| {
        Failure::invalid(
            format!("metrics_listen = \"{text}\" is no address with a port"),
            "write it like \"10.0.0.1:9180\", or \"[::]:9180\" for all addresses",
        )
    })
}

/// Number of data threads.
fn thread_count(asked: Option<usize>) -> Result<usize> {
    let threads = asked.unwrap_or_else(threads_default);
    if threads == 0 || threads > THREADS_MAX {
        return Err(Failure::invalid(
            format!("threads = {threads} is out of range"),
            format!("use 1 to {THREADS_MAX}"),
        ));
    }
    Ok(threads)
}

/// Microseconds that a data thread polls before it sleeps.
fn spin_us(asked: Option<u32>) -> Result<u32> {
    let poll_spin_us = asked.unwrap_or(SPIN_US_DEFAULT);
    if poll_spin_us > SPIN_US_MAX {
        return Err(Failure::invalid(
            format!("poll_spin_us = {poll_spin_us} is out of range"),
            format!("use at most {SPIN_US_MAX}"),
        ));
    }
    Ok(poll_spin_us)
}

fn threads_default() -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    cpus.min(THREADS_DEFAULT)
}

fn check_pin(pin: &[usize]) -> Result<()> {
    let allowed = rustix::thread::sched_getaffinity(None).ok();
    let bad = pin.iter().find(|cpu| {
        **cpu >= rustix::thread::CpuSet::MAX_CPU
            || allowed.as_ref().is_some_and(|set| !set.is_set(**cpu))
    });
    match bad {
        _ if pin.is_empty() => Err(Failure::invalid(
            "pin names no CPU",
            "list at least one, or leave pin out",
        )),
        Some(cpu) => Err(Failure::invalid(
            format!("pin: CPU {cpu} does not exist or is not allowed to this process"),
            "name CPUs that `nproc` and `taskset -p` allow",
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let e = parse("threads = 1\nthreds = 2\n", "p.toml").unwrap_err();
        assert!(
            e.to_string()
                .starts_with("config p.toml line 2: unknown key `threds`"),
            "{e}"
        );
        assert_eq!(e.exit_code(), 2);
        let e = parse(
            "devices = [{ path = \"/x\", size = \"1G\", sice = 1 }]",
            "p.toml",
        )
        .unwrap_err();
        assert!(e.to_string().contains("a device is a path"), "{e}");
    }

    #[test]
    fn a_wrong_value_is_named() {
        let e = parse("device_size = \"10X\"", "p.toml").unwrap_err();
        assert!(e.to_string().contains("unknown size suffix 'X'"), "{e}");
        let e = resolve(File {
            threads: Some(0),
            ..File::default()
        })
        .unwrap_err();
        assert!(e.to_string().contains("threads = 0"), "{e}");
        let e = resolve(File {
            socket_mode: Some("rw".into()),
            ..File::default()
        })
        .unwrap_err();
        assert!(e.to_string().contains("socket_mode 'rw'"), "{e}");
        let e = resolve(File {
            socket_owner: Some("no-such-user-x".into()),
            ..File::default()
        })
        .unwrap_err();
        assert!(e.to_string().contains("no-such-user-x"), "{e}");
    }

    #[test]
    fn every_key_of_the_file_is_understood() {
        let file = parse(
            "data = \"/d\"\nadmin_socket = \"/d/a\"\nmetrics_listen = \"[::1]:9180\"\nstore = \
             \"null\"\ndevices = [\"/dev/x\", { path = \"/y\", size = \"1G\" }]\n\
             device_size = \"2G\"\ndevice_preallocation = \"full\"\nthreads = 3\npoll = \
             \"never\"\npoll_spin_us = 20\n\
             socket_mode = \"0660\"\nsocket_owner = \"root:0\"\n\
             guest_memory_max_per_attachment = \"1T\"\nguest_memory_max = \"2T\"\n\
             pinned_memory_max_per_attachment = \"3G\"\npinned_memory_max = \"4G\"\nsandbox = \
             \"best-effort\"\nsocket_dirs = [\"/run/x\"]\nlisten = \"10.0.0.1\"\ncontrol_port = 1\ndata_port \
             = 2\n\
             enrol_port = 3\nwire = \"crc\"\ntransport = \"auto\"\nname = \"one\"\nlabels = \
             { host = \"h\", rack = \"r\" }\nroles = [\"meta\", \"storage\"]\npeers = [\"10.0.0.2\"]\n",
            "p.toml",
        )
        .unwrap();
        let config = resolve(file).unwrap();
        assert_eq!(config.store, StoreKind::Null);
        assert_eq!(config.metrics_listen, "[::1]:9180".parse().ok());
        assert_eq!(config.device_preallocation, Preallocation::Full);
        let limits = [config.guest_memory, config.pinned_memory];
        let limits = limits.map(|limit| (limit.per_attachment, limit.total));
        assert_eq!(limits, [(1 << 40, 2 << 40), (3 << 30, 4 << 30)]);
        assert_eq!(config.peers.listen, "10.0.0.1".parse().ok());
        assert_eq!(config.peers.wire, Some(Wire::Crc));
        assert_eq!(config.peers.transport, Some(Transport::Auto));
        assert_eq!(config.peers.labels.rack.as_deref(), Some("r"));
        let roles = Some(vec![RoleName::Meta, RoleName::Storage]);
        assert_eq!(config.peers.roles, roles);
        assert_eq!(config.privileges.sandbox, Sandbox::BestEffort);
        assert_eq!(config.privileges.socket_dirs, [Path::new("/run/x")]);
        assert_eq!(config.devices[1].size(), Some(Size(1 << 30)));
        assert_eq!(
            (config.threads, config.poll, config.poll_spin_us),
            (3, Poll::Never, 20)
        );
        assert_eq!(
            config.socket_access,
            SocketAccess {
                mode: 0o660,
                uid: Some(0),
                gid: Some(0)
            }
        );
    }

    #[test]
    fn devices_are_named_only_for_a_node_that_stores_data() {
        let told = |roles: &[RoleName]| {
            resolve(File {
                devices: Some(vec![DeviceSpec::Path("/dev/sdx".into())]),
                roles: Some(roles.to_vec()),
                ..File::default()
            })
        };
        told(&[RoleName::Host, RoleName::Storage]).unwrap();
        let e = told(&[RoleName::Host, RoleName::Meta]).unwrap_err();
        assert!(e.to_string().contains("/dev/sdx"), "{e}");
        assert!(e.to_string().contains("add storage to its roles"), "{e}");
        assert_eq!(e.exit_code(), 2);
    }

    #[test]
    fn a_device_option_may_carry_a_size() {
        assert_eq!("/dev/sdb".parse(), Ok(DeviceSpec::Path("/dev/sdb".into())));
        assert_eq!(
            "/srv/a.img:10G".parse(),
            Ok(DeviceSpec::Sized(SizedDevice {
                path: "/srv/a.img".into(),
                size: Size(10 << 30)
            }))
        );
        for path in [
            "/dev/disk/by-path/pci-0000:00:1f.2-ata-1",
            "/dev/disk/by-path/pci-0:0",
        ] {
            assert_eq!(path.parse(), Ok(DeviceSpec::Path(path.into())));
        }
        assert!("/srv/a.img:10Q".parse::<DeviceSpec>().is_err());
    }
}
