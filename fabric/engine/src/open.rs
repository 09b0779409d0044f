//! Opens the configured devices, making the stores that are to be made.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fabric_store::api::{CoreParams, DeviceLabel};
use fabric_store::device::SyncDevice;
use fabric_store::error::{OpenError, hex};
use fabric_store::file::{Allocation, DeviceError, DeviceFile, OpenedAhead};
use fabric_store::recovery;
use fabric_types::block::{BLOCK_BYTES, Block};

use super::config::{DeviceConfig, FabricConfig, FabricError, Missing};
use super::stores::OpenStore;

/// A device that the node goes without, and why it could not be opened.
pub type Lacking = (PathBuf, FabricError);

/// Opens all, or none; or those that can be opened, where the others may lack.
pub fn open_devices(
    devices: &[DeviceConfig],
    config: &FabricConfig,
) -> Result<(Vec<OpenStore>, Vec<Lacking>), FabricError> {
    let (mut open, mut lacking) = (Vec::new(), Vec::new());
    for device in devices {
        match open_one(device, config) {
            Ok(store) => open.push(store),
            Err(error) if may_lack(device, config, &error) => {
                lacking.push((device.path.clone(), error));
            }
            Err(error) => return Err(error),
        }
    }
    Ok((open, lacking))
}

/// One that another process has is well: whoever started that is told.
fn may_lack(device: &DeviceConfig, config: &FabricConfig, error: &FabricError) -> bool {
    let is_in_use = matches!(error, FabricError::Device(DeviceError::InUse(_)));
    config.may_lack && config.net.is_some() && device.missing == Missing::Refuse && !is_in_use
}

/// Refuses a device that [`Missing::FormatBlank`] would not format: one with a store, or with other content.
///
/// # Errors
/// It is in use, cannot be read, or is not blank.
pub fn check_blank(path: &Path, opened: &OpenedAhead) -> Result<(), FabricError> {
    let mut file = opened.device(path)?;
    match recovery::read_label(&mut file) {
        Err(OpenError::NotFormatted) => refuse_foreign_content(&mut file),
        Err(source) => Err(FabricError::Store {
            path: path.to_owned(),
            source,
        }),
        Ok(_) => Err(FabricError::NotBlank(path.to_owned())),
    }
}

/// Opens one device, making its store if it is to be made.
pub fn open_one(device: &DeviceConfig, config: &FabricConfig) -> Result<OpenStore, FabricError> {
    let path = device.path.as_path();
    let store = |source| FabricError::Store {
        path: path.to_owned(),
        source,
    };
    let start = Instant::now();
    let mut file = open_or_create(device, config)?;
    let label = match recovery::read_label(&mut file) {
        Err(OpenError::NotFormatted) if device.missing != Missing::Refuse => {
            refuse_foreign_content(&mut file)?;
            format(&mut file, config).map_err(store)?;
            recovery::read_label(&mut file)
        }
        other => other,
    }
    .map_err(store)?;
    let params = CoreParams {
        cluster: Some(config.cluster),
        ..config.params
    };
    let nonce = random().map_err(FabricError::os("get random bytes"))?;
    let (cores, report) = recovery::open(&mut file, &params, nonce).map_err(store)?;
    tracing::info!(
        device = %path.display(),
        id = hex(&label.device),
        millis = start.elapsed().as_millis() as u64,
        "store opened: {report}"
    );
    Ok(OpenStore {
        device: file,
        label: DeviceLabel {
            cluster: label.cluster,
            device: label.device,
        },
        cores,
        report,
    })
}

fn open_or_create(device: &DeviceConfig, config: &FabricConfig) -> Result<DeviceFile, FabricError> {
    let path = device.path.as_path();
    let Missing::CreateFile {
        size_bytes,
        allocation,
    } = device.missing
    else {
        return Ok(config.opened.device(path)?);
    };
    if path.exists() {
        return Ok(config.opened.device(path)?);
    }
    // Made beside its place: what a kill leaves of it must not stand in the way of the next try.
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(UNFINISHED_SUFFIX);
    let unfinished = Path::new(&unfinished);
    if unfinished.exists() {
        // Whoever still works on it holds its lock.
        drop(DeviceFile::open(unfinished)?);
        std::fs::remove_file(unfinished)
            .map_err(FabricError::os("remove an unfinished device file"))?;
    }
    let made = create(unfinished, size_bytes, allocation, config).and_then(|()| {
        std::fs::rename(unfinished, path)
            .and_then(|()| sync_parent(path))
            .map_err(FabricError::os("put the device file into its place"))
    });
    if let Err(error) = made {
        // The error at hand says more than a failing removal would.
        let _ = std::fs::remove_file(unfinished);
        return Err(error);
    }
    Ok(DeviceFile::open(path)?)
}

/// Name of a device file that is being made, behind its own.
const UNFINISHED_SUFFIX: &str = ".new";

fn create(
    path: &Path,
    size_bytes: u64,
    allocation: Allocation,
    config: &FabricConfig,
) -> Result<(), FabricError> {
    let mut file = DeviceFile::create(path, size_bytes, allocation)?;
    format(&mut file, config).map_err(|source| FabricError::Store {
        path: path.to_owned(),
        source,
    })
}

fn sync_parent(path: &Path) -> std::io::Result<()> {
    match path.parent() {
        Some(parent) => std::fs::File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

fn format(file: &mut DeviceFile, config: &FabricConfig) -> Result<(), OpenError> {
    let device = random().map_err(|source| OpenError::Io {
        what: "make an identity",
        offset: 0,
        source,
    })?;
    let label = DeviceLabel {
        cluster: config.cluster,
        device,
    };
    recovery::format(file, label, false)?;
    tracing::info!(device = %file.path().display(), id = hex(&device), "store formatted");
    Ok(())
}

/// Bytes at the start of a device that must be zero for it to count as blank: partition tables and the
/// superblocks of the usual file systems lie there.
const BLANK_BYTES: usize = 128 << 10;

fn refuse_foreign_content(file: &mut DeviceFile) -> Result<(), FabricError> {
    let path = file.path().to_owned();
    let mut block = Block([0; BLOCK_BYTES]);
    let len = file.capacity_bytes().min(BLANK_BYTES as u64);
    for offset in (0..len).step_by(BLOCK_BYTES) {
        file.read_at(offset, &mut block.0)
            .map_err(FabricError::os("read the device"))?;
        if block.0.iter().any(|&byte| byte != 0) {
            return Err(FabricError::NotBlank(path));
        }
    }
    Ok(())
}

fn random() -> std::io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    std::fs::File::open(Path::new("/dev/urandom"))?.read_exact(&mut bytes)?;
    Ok(bytes)
}
