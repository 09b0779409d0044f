//! Which devices the fabric is to open, and which it is to make. A device that meta knows is never made anew,
//! and a node that is alone never leaves one out: what lies on it would read as zeroes, and be written
//! elsewhere a second time. A node of several goes on without it ([`lacking`]).

mod lacking;
pub mod uses;

use std::fs::File;
use std::path::{Path, PathBuf};

use api::failure::{Context, Failure, Kind, Result};
use api::size::Size;
use config::datadir::make_dir;
use config::{DeviceSpec, Preallocation, check_device_size};
use fabric::{DeviceConfig, FabricError, Missing, check_blank};
use fabric_store::OpenError;
use fabric_store::device::SyncDevice;
use fabric_store::file::{Allocation, OpenedAhead};
use fabric_store::recovery::read_label;
use uuid::Uuid;

use service::prepared::Prepared;

use crate::device_list::{Added, DeviceList};
use crate::storage::{fabric_failure, free_bytes};

pub use lacking::{LeftOut, Origin};

/// A device file may grow to this share of the filesystem's free space, in percent. The rest is left to the
/// filesystem, to meta's database and to images being converted.
const SHARE_PERCENT: u64 = 50;
/// Device files are made a multiple of this by default.
const STEP_BYTES: u64 = 64 << 20;

/// What is left to whoever has lost a device for good.
const ANEW: &str = "to begin anew without those data choose another data directory, and if this node is one \
    of several have the \
                    others forget it first, with `penstock node remove`, and join anew";

/// A device that the configuration names.
struct Named {
    path: PathBuf,
    size: Option<Size>,
    content: Content,
}

/// What is at a path.
enum Content {
    /// Nothing.
    Absent,
    /// No store.
    Unlabelled,
    /// A store of this cluster, and its identity.
    Store(Uuid),
}

/// Devices that a node is to open.
pub struct DeviceSelection {
    /// How to open them.
    pub devices: Vec<DeviceConfig>,
    /// The stores among them.
    pub stores: Vec<(PathBuf, Uuid)>,
    /// Those that cannot be opened, and stop no start: they were added, and nothing lies on them yet, or
    /// other nodes have what does.
    pub left_out: Vec<LeftOut>,
}

/// The node whose devices they are.
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    /// Its cluster.
    pub cluster: Uuid,
    /// There are other nodes, which may have what this one lacks.
    pub has_peers: bool,
    /// It has the role `storage`. Without it nothing is made or added; what it has nevertheless is opened
    /// until it is emptied.
    pub stores_data: bool,
}

/// What the configuration and the list name together.
struct Spec {
    spec: DeviceSpec,
    /// Only the list names it.
    is_added: bool,
}

fn specs(config: &Prepared, default: &Path, list: &DeviceList) -> Vec<Spec> {
    let mut named = config.devices.clone();
    if named.is_empty() {
        named.push(DeviceSpec::Path(default.to_owned()));
    }
    let new = |added: &&Added| named.iter().all(|spec| spec.path() != added.path);
    let added: Vec<DeviceSpec> = list.added.iter().filter(new).map(Added::spec).collect();
    let all = named.into_iter().map(|spec| (spec, false));
    let all = all.chain(added.into_iter().map(|spec| (spec, true)));
    all.map(|(spec, is_added)| Spec { spec, is_added })
        .collect()
}

/// Refuses devices that hold data while the metadata, which say what is whose, are not there. Made anew they
/// would be those of another cluster, and the device would be blamed for that. `default` is the path of the
/// default device.
pub fn refuse_without_metadata(config: &Prepared, default: &Path, meta_dir: &Path) -> Result<()> {
    let list = DeviceList::read(&config.data)?;
    for spec in specs(config, default, &list) {
        let path = spec.spec.path();
        if !path.exists() {
            continue;
        }
        let file = config.opened.device(path);
        let mut file = file.map_err(|e| fabric_failure(e.into()))?;
        if read_label(&mut file).is_ok() {
            return Err(Failure::new(
                Kind::NotFound,
                format!(
                    "there are no metadata in {}, and device {} holds data: without them nobody knows of \
                     which volumes",
                    meta_dir.display(),
                    path.display()
                ),
                "bring the metadata directory back, from a backup for example; to begin anew without those \
                 data choose \
                 another data directory and other devices",
            ));
        }
    }
    Ok(())
}

/// Of a node that stores no data: what meta knows of it.
fn held(known: &[meta::Device]) -> Vec<Spec> {
    let spec = |device: &meta::Device| Spec {
        spec: DeviceSpec::Path(PathBuf::from(&device.path)),
        is_added: false,
    };
    known.iter().map(spec).collect()
}

/// What the fabric is to open, or to make. `known` is what meta knows of this node; one that has peers may
/// lack some of that. Writes nothing.
pub fn select(
    config: &Prepared,
    default: &Path,
    known: &[meta::Device],
    owner: Owner,
) -> Result<DeviceSelection> {
    let (cluster, has_peers) = (owner.cluster, owner.has_peers);
    let list = DeviceList::read(&config.data)?;
    let (mut named, mut failed, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
    let is_unknown = |path: &Path| known.iter().all(|device| Path::new(&device.path) != path);
    let specs = match owner.stores_data {
        true => specs(config, default, &list),
        false => held(known),
    };
    for Spec { spec, is_added } in specs {
        let path = std::path::absolute(spec.path()).unwrap_or_else(|_| spec.path().to_owned());
        // Nothing is to be made of a device that meta knows, whatever is there now.
        let is_new = is_added && is_unknown(&path);
        let by = (cluster, &config.opened);
        let found = find(&spec, &path, (is_new, path == default), by);
        match found {
            Ok(content) if is_removed(&list, &path, &content) => leave_alone(&path),
            Ok(content) => named.push(Named {
                content,
                size: spec.size().or(config.device_size),
                path,
            }),
            Err(_) if is_unknown(&path) && list.removed.iter().any(|one| one.path == path) => {
                leave_alone(&path);
            }
            Err(failure) if is_new => left_out.push(LeftOut {
                path,
                failure,
                origin: Origin::Added,
            }),
            Err(failure) => failed.push((path, failure)),
        }
    }
    let is_there = |device: &&meta::Device| {
        let same = |named: &Named| matches!(named.content, Content::Store(id) if id == device.uuid);
        named.iter().any(same)
    };
    let missing: Vec<&meta::Device> = known.iter().filter(|device| !is_there(device)).collect();
    if has_peers && !missing.is_empty() {
        left_out.extend(lacking::go_without(&mut named, failed, &missing, cluster)?);
    } else if let Some((_, failure)) = failed.into_iter().next() {
        return Err(failure);
    } else if let Some(device) = missing.first() {
        return Err(missing_failure(&named, device));
    }
    let mut selection = DeviceSelection {
        devices: Vec::new(),
        stores: Vec::new(),
        left_out,
    };
    for named in named {
        selection.open(named, config)?;
    }
    Ok(selection)
}

impl DeviceSelection {
    /// Opens what is at a place, or makes a device there.
    fn open(&mut self, named: Named, config: &Prepared) -> Result<()> {
        let Named {
            path,
            size,
            content,
        } = named;
        if let Content::Store(id) = content {
            self.stores.push((path.clone(), id));
        }
        let missing = if_missing(&path, size, &content, config)?;
        self.devices.push(DeviceConfig { path, missing });
        Ok(())
    }
}

fn leave_alone(path: &Path) {
    eprintln!(
        "penstock: device {} was removed and is left alone; take it out of the configuration",
        path.display()
    );
}

/// What is at a named path, if that can be opened or made.
fn find(
    spec: &DeviceSpec,
    path: &Path,
    (is_added, is_default): (bool, bool),
    (cluster, opened): (Uuid, &OpenedAhead),
) -> Result<Content> {
    let content = look(path, cluster, opened)?;
    match content {
        // The default device's own directory is made with it.
        Content::Absent if !is_default => refuse_without_directory(path)?,
        Content::Unlabelled if is_added => check_blank(path, opened).map_err(fabric_failure)?,
        Content::Absent | Content::Unlabelled | Content::Store(_) => {}
    }
    if is_added && matches!(content, Content::Absent) {
        check_room(spec, path)?;
    }
    Ok(content)
}

fn is_removed(list: &DeviceList, path: &Path, content: &Content) -> bool {
    match content {
        Content::Store(uuid) => list.is_removed(*uuid),
        Content::Absent => list.removed.iter().any(|one| one.path == path),
        // Somebody cleared it, and means it to be used.
        Content::Unlabelled => false,
    }
}

/// What becomes of a device that is added.
pub enum Addition {
    /// It is opened, or made, at once; the identity of the store that is there already.
    Now(DeviceConfig, Option<Uuid>),
    /// The cluster knows the device of this identity. The next start opens it.
    NextStart(Uuid),
}

impl Addition {
    /// The identity of the store that is there.
    pub fn found(&self) -> Option<Uuid> {
        match self {
            Addition::Now(_, found) => *found,
            Addition::NextStart(found) => Some(*found),
        }
    }
}

/// How a device is opened or made, which may be one of `known`, the cluster's devices. Refuses what cannot be
/// opened or made, and formats nothing.
pub fn addition(
    config: &Prepared,
    spec: &DeviceSpec,
    cluster: Uuid,
    known: &[Uuid],
) -> Result<Addition> {
    let path = spec.path();
    if let Some(size) = spec.size() {
        check_device_size(size)?;
    }
    let content = find(spec, path, (true, false), (cluster, &config.opened))?;
    let found = match content {
        Content::Store(uuid) => Some(uuid),
        Content::Unlabelled | Content::Absent => None,
    };
    let missing = match content {
        Content::Store(uuid) if DeviceList::read(&config.data)?.is_removed(uuid) => {
            return Err(still_holds(config, path));
        }
        Content::Store(uuid) if known.contains(&uuid) => return Ok(Addition::NextStart(uuid)),
        content => if_missing(path, spec.size(), &content, config)?,
    };
    let path = path.to_owned();
    Ok(Addition::Now(DeviceConfig { path, missing }, found))
}

/// What to do with a place, by what is there.
fn if_missing(
    path: &Path,
    size: Option<Size>,
    content: &Content,
    config: &Prepared,
) -> Result<Missing> {
    match content {
        Content::Store(_) => Ok(Missing::Refuse),
        Content::Unlabelled => Ok(Missing::FormatBlank),
        Content::Absent => create(path, size, config.device_preallocation),
    }
}

fn still_holds(config: &Prepared, path: &Path) -> Failure {
    let shown = path.display();
    Failure::new(
        Kind::Conflict,
        format!("device {shown} was removed from this node and still holds what it held"),
        clearing(config, path),
    )
}

/// How a device is made blank: it has a label in its first block and one in its last.
pub fn clearing(config: &Prepared, path: &Path) -> String {
    let shown = path.display();
    // A file keeps its length.
    let dd = format!("`dd if=/dev/zero of={shown} bs=4096 count=4096 conv=notrunc`");
    match config.opened.device(path) {
        Ok(device) => format!(
            "clear its beginning and its end first: {dd}, and the same with seek={}; or delete it if it is a \
             file",
            (device.capacity_bytes() / 4096).saturating_sub(4096)
        ),
        Err(_) => {
            format!("clear its first and its last 16 MiB first: {dd}, and the same with seek")
        }
    }
}

/// Refuses a file that could not be made.
fn check_room(spec: &DeviceSpec, path: &Path) -> Result<()> {
    let shown = path.display();
    refuse_missing_node(path)?;
    let Some(size) = spec.size() else {
        return Err(Failure::invalid(
            format!("there is no file {shown}, and no size to make one of"),
            format!("give one, like {shown}:100G"),
        ));
    };
    try_file(path)?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    let free = free_bytes(dir)?;
    match size.0 > free {
        true => Err(Failure::new(
            Kind::NoSpace,
            format!(
                "{} has only {} free for a device file of {size}",
                dir.display(),
                Size(free)
            ),
            "make room, or choose another place or size",
        )),
        false => Ok(()),
    }
}

/// Refuses a place where no file can be made. One is made, for modes, owners and capabilities do not tell for
/// sure, under another name: a crash must not leave what looks like a device.
fn try_file(path: &Path) -> Result<()> {
    let mut trial = path.as_os_str().to_owned();
    // Nobody's file has that name, and if one does it stays.
    trial.push(format!(".{}.trial", Uuid::new_v4().simple()));
    let trial = PathBuf::from(trial);
    let made = File::create_new(&trial).and_then(|_| std::fs::remove_file(&trial));
    made.context_hint(
        || format!("make device file {}", path.display()),
        "choose a place where this daemon's user can write",
    )
}

fn look(path: &Path, cluster: Uuid, opened: &OpenedAhead) -> Result<Content> {
    // What cannot be looked at is there, and opening it tells why.
    if let Ok(false) = path.try_exists() {
        return Ok(Content::Absent);
    }
    let mut file = opened.device(path).map_err(|e| fabric_failure(e.into()))?;
    let source = match read_label(&mut file) {
        Ok(label) if label.cluster == *cluster.as_bytes() => {
            return Ok(Content::Store(Uuid::from_bytes(label.device)));
        }
        Ok(label) => OpenError::OtherCluster {
            found: Uuid::from_bytes(label.cluster).simple().to_string(),
            expected: cluster.simple().to_string(),
        },
        Err(OpenError::NotFormatted) => return Ok(Content::Unlabelled),
        Err(e) => e,
    };
    let path = path.to_owned();
    Err(fabric_failure(FabricError::Store { path, source }))
}

/// Why a node that is alone does not start without a device. Devices are compared by identity, for paths like
/// `/dev/sdb` change.
fn missing_failure(named: &[Named], device: &meta::Device) -> Failure {
    let path = Path::new(&device.path);
    let found = named.iter().find(|named| named.path == path);
    let shown = path.display();
    match found.map(|named| &named.content) {
        None if path.exists() => not_named(&device.path),
        Some(Content::Unlabelled) => Failure::new(
            Kind::NotFound,
            format!(
                "device {shown} is blank or was wiped: it has no Penstock label, and it held data of this \
                 node's volumes"
            ),
            format!("bring the right disk or file back, or name the path where it is now; {ANEW}"),
        ),
        _ => Failure::new(
            Kind::NotFound,
            format!("device {shown} is missing, and with it the data of this node's volumes"),
            format!("bring it back, or name the path where it is now; {ANEW}"),
        ),
    }
}

fn not_named(path: &str) -> Failure {
    Failure::new(
        Kind::NotFound,
        format!("device {path} holds data of this node's volumes and is not among its devices"),
        format!("name it again, with --device {path} or in the configuration's devices; {ANEW}"),
    )
}

/// The directory of a named device is not made: a file system that should be mounted there may be missing.
fn refuse_without_directory(path: &Path) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    if dir.is_dir() || path.starts_with("/dev") {
        return Ok(());
    }
    Err(Failure::new(
        Kind::NotFound,
        format!(
            "device {}: there is no directory {}",
            path.display(),
            dir.display()
        ),
        "mount what belongs there, or make the directory",
    ))
}

fn refuse_missing_node(path: &Path) -> Result<()> {
    match path.starts_with("/dev") {
        true => Err(Failure::new(
            Kind::NotFound,
            format!("device {} does not exist", path.display()),
            "name an existing block device, or a file elsewhere",
        )),
        false => Ok(()),
    }
}

fn create(path: &Path, size: Option<Size>, preallocation: Preallocation) -> Result<Missing> {
    refuse_missing_node(path)?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    make_dir(dir)?;
    let free = free_bytes(dir)?;
    let size = match size {
        Some(size) => size,
        None => Size(free / 100 * SHARE_PERCENT / STEP_BYTES * STEP_BYTES),
    };
    if size.0 == 0 {
        return Err(Failure::new(
            Kind::NoSpace,
            format!(
                "{} has only {} free for a device file",
                dir.display(),
                Size(free)
            ),
            "make room, or choose another place with --data DIR or --device PATH",
        ));
    }
    let how = match preallocation {
        Preallocation::Off => "takes its space as it is written",
        Preallocation::Falloc | Preallocation::Full => "takes its space now",
    };
    eprintln!(
        "penstock: making device file {} of {size}, which {how}",
        path.display()
    );
    let allocation = match preallocation {
        Preallocation::Off => Allocation::Sparse,
        Preallocation::Falloc => Allocation::Preallocated,
        Preallocation::Full => Allocation::Written,
    };
    Ok(Missing::CreateFile {
        size_bytes: size.0,
        allocation,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_not_added_where_none_can_be_made() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("more.img");
        try_file(&path).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let read_only = std::fs::Permissions::from_mode(0o555);
        std::fs::set_permissions(dir.path(), read_only).unwrap();
        let refused = std::thread::spawn(move || {
            // SAFETY: changes, for this thread alone, who it is to file systems; to root no mode matters.
            unsafe { libc::setfsuid(65534) };
            try_file(&path).unwrap_err().to_string()
        });
        let refused = refused.join().unwrap();
        assert!(
            refused.contains("more.img: permission denied")
                && refused.contains("this daemon's user"),
            "{refused}"
        );
    }
}
