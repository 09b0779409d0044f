//! Which devices the fabric is to open, and which it is to make. A device that meta knows is never made anew, and never
//! left out: what lies on it would read as zeroes, and be written elsewhere a second time.

use std::path::{Path, PathBuf};

use fabric::engine::{DeviceConfig, FabricError, Missing};
use fabric::store::OpenError;
use fabric::store::file::{Allocation, DeviceFile};
use fabric::store::recovery::read_label;
use uuid::Uuid;

use crate::config::{Config, DeviceSpec, Preallocation};
use crate::failure::{Failure, Kind, Result};
use crate::size::Size;

use super::datadir::make_dir;
use super::storage::{fabric_failure, free_bytes};

/// A device file may grow to this share of the filesystem's free space, in percent. The rest is left to the
/// filesystem, to meta's database and to images being converted.
const SHARE_PERCENT: u64 = 50;
/// Device files are made a multiple of this by default.
const STEP_BYTES: u64 = 64 << 20;

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

/// Refuses devices that hold data while the metadata, which say what is whose, are not there. Made anew they would be those of
/// another cluster, and the device would be blamed for that. `default` is the path of the default device.
pub fn refuse_without_metadata(config: &Config, default: PathBuf, meta_dir: &Path) -> Result<()> {
    let default = DeviceSpec::Path(default);
    let specs = match config.devices.as_slice() {
        [] => std::slice::from_ref(&default),
        specs => specs,
    };
    for path in specs.iter().map(DeviceSpec::path).filter(|p| p.exists()) {
        let mut file = DeviceFile::open(path).map_err(|e| fabric_failure(e.into()))?;
        if read_label(&mut file).is_ok() {
            return Err(Failure::new(
                Kind::NotFound,
                format!(
                    "there are no metadata in {}, and device {} holds data: without them nobody knows of which volumes",
                    meta_dir.display(),
                    path.display()
                ),
                "bring the metadata directory back, from a backup for example; to begin anew without those data choose \
                 another data directory and other devices",
            ));
        }
    }
    Ok(())
}

/// What the fabric is to open, or to make. `known` is what meta knows of this node. Writes nothing.
pub fn settle(
    config: &Config,
    default: PathBuf,
    known: &[meta::Device],
    cluster: Uuid,
) -> Result<Vec<DeviceConfig>> {
    let default = DeviceSpec::Path(default);
    let specs = match config.devices.as_slice() {
        [] => std::slice::from_ref(&default),
        specs => specs,
    };
    let mut named = Vec::new();
    for spec in specs {
        let path = std::path::absolute(spec.path()).unwrap_or_else(|_| spec.path().to_owned());
        let content = look(&path, cluster)?;
        if matches!(content, Content::Absent) && path != default.path() {
            refuse_without_directory(&path)?;
        }
        named.push(Named {
            content,
            size: spec.size().or(config.device_size),
            path,
        });
    }
    refuse_missing(&named, known)?;
    let mut devices = Vec::new();
    for Named {
        path,
        size,
        content,
    } in named
    {
        let missing = match content {
            Content::Store(_) => Missing::Refuse,
            Content::Unlabelled => Missing::FormatBlank,
            Content::Absent => create(&path, size, config.device_preallocation)?,
        };
        devices.push(DeviceConfig { path, missing });
    }
    Ok(devices)
}

fn look(path: &Path, cluster: Uuid) -> Result<Content> {
    if !path.exists() {
        return Ok(Content::Absent);
    }
    let mut file = DeviceFile::open(path).map_err(|e| fabric_failure(e.into()))?;
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

/// Devices are compared by identity, for paths like `/dev/sdb` change.
fn refuse_missing(named: &[Named], known: &[meta::Device]) -> Result<()> {
    let there = |device: &&meta::Device| {
        let same = |named: &Named| matches!(named.content, Content::Store(id) if id == device.uuid);
        named.iter().any(same)
    };
    let Some(device) = known.iter().find(|device| !there(device)) else {
        return Ok(());
    };
    let path = Path::new(&device.path);
    let is_named = named.iter().any(|named| named.path == path);
    let shown = path.display();
    Err(if path.exists() && !is_named {
        Failure::new(
            Kind::NotFound,
            format!(
                "device {shown} holds data of this node's volumes and is not among its devices"
            ),
            format!(
                "name it again, with --device {shown} or in the configuration's devices; to begin anew without those \
                 data choose another data directory"
            ),
        )
    } else if named
        .iter()
        .any(|named| named.path == path && matches!(named.content, Content::Unlabelled))
    {
        Failure::new(
            Kind::NotFound,
            format!(
                "device {shown} is blank or was wiped: it has no Penstock label, and it held data of this node's volumes"
            ),
            "bring the right disk or file back, or name the path where it is now; to begin anew without those data \
             choose another data directory",
        )
    } else {
        Failure::new(
            Kind::NotFound,
            format!("device {shown} is missing, and with it the data of this node's volumes"),
            "bring it back, or name the path where it is now; to begin anew without those data choose another data \
             directory",
        )
    })
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

fn create(path: &Path, size: Option<Size>, preallocation: Preallocation) -> Result<Missing> {
    if path.starts_with("/dev") {
        return Err(Failure::new(
            Kind::NotFound,
            format!("device {} does not exist", path.display()),
            "name an existing block device, or a file elsewhere",
        ));
    }
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
