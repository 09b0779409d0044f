//! The first start of a node in a cluster that was alone with several devices. Alone, it kept each volume on
//! one of them; in a cluster each chunk is looked for on the device of its placement group. Before the
//! metadata say that the node is one of several, everything is copied there, and until then it can go on
//! alone. After that, and before anything is served, the devices are told. What lies elsewhere is freed
//! while the node serves. What was cut is done by the next start.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::failure::{Context, Failure, Kind, Result};
use config::datadir::DataDir;
use config::identity::{Identity, Record};
use fabric::spread::Spread;
use fabric::{DeviceConfig, FabricConfig, Missing, StoreKind};
use meta::first::Layout;
use meta::recovery::RecoveryError;
use meta::{Incarnation, Meta, NodeId, OpenError};
use service::waiting::blocking;
use uuid::Uuid;

use crate::serve::prepared::Prepared;

use super::devices::uses::Uses;
use super::devices::{self, DeviceSelection, Owner};
use super::node::Purpose;
use super::starting::{Progress, Starting};
use super::storage::{fabric_failure, free_bytes, holes};

/// How often the log says how far it is.
const TELL_PAUSE: Duration = Duration::from_secs(10);

/// The record of a node whose data are to be spread.
fn record(config: &Prepared) -> Result<Option<Record>> {
    if config.store == config::StoreKind::Null {
        return Ok(None);
    }
    let identity = Identity::load(&config.data)?;
    let record = identity.map(|identity| identity.record);
    Ok(record.filter(|record| record.is_to_spread))
}

/// Copies the node's data to the devices of their placement groups, if that is to be done and the node is
/// still alone by its metadata.
pub async fn copy_if_due(
    config: &Prepared,
    (data, meta_dir): (&DataDir, &Path),
    purpose: Purpose,
    starting: &Starting,
) -> Result<()> {
    let Some(record) = record(config)? else {
        return Ok(());
    };
    if purpose == Purpose::OneVolume {
        return Err(Failure::new(
            Kind::Conflict,
            "this node became the first of a cluster, and its data are not spread over its devices yet",
            "run `penstock serve` first",
        ));
    }
    let copier = Copier {
        config: config.clone(),
        default: data.default_device(),
        record,
        progress: starting.progress(),
    };
    let meta_dir = meta_dir.to_owned();
    blocking(move || {
        let layout = match Layout::read(&meta_dir) {
            Ok((layout, true)) => layout,
            // They are copied.
            Ok((_, false)) => return Ok(()),
            Err(error @ RecoveryError::Open(OpenError::Unapplied { .. })) => {
                return Err(copier.with_way_back(metadata_failure(error)));
            }
            Err(error) => return Err(metadata_failure(error)),
        };
        let told = |failure| copier.with_way_back(failure);
        copier.check_network().map_err(told)?;
        let spread = copier.open(&layout).map_err(told)?;
        if let Some(path) = spread.served_in_cluster() {
            return Err(served_in_cluster(path));
        }
        let copied = copier.copy(spread, &layout);
        copier.progress.report(None);
        copied.map_err(told)
    })
    .await
}

struct Copier {
    config: Prepared,
    default: PathBuf,
    record: Record,
    progress: Progress,
}

impl Copier {
    /// Refuses now what would be refused after the copying.
    fn check_network(&self) -> Result<()> {
        let settings = self.record.settings.clone().with(&self.config.peers);
        settings.check_ports(true)?;
        settings.check_addresses()
    }

    fn copy(&self, mut spread: Spread, layout: &Layout) -> Result<()> {
        let comes = spread.plan(|chunk| layout.device_of(chunk));
        refuse_without_host_room(&comes.map_err(fabric_failure)?)?;
        tracing::warn!(
            devices = layout.devices.len(),
            "this node becomes the first of a cluster: its data are spread over its devices, once, before \
             guests are served"
        );
        let mut next = Instant::now() + TELL_PAUSE;
        let copied = spread.copy(|state| {
            self.progress.report(Some(format!(
                "spreads its data over its devices: {} of {} chunks",
                state.copied, state.chunks
            )));
            if Instant::now() >= next {
                next = Instant::now() + TELL_PAUSE;
                tracing::info!(
                    chunks = state.chunks,
                    copied = state.copied,
                    "spreading data"
                );
            }
        });
        let closed = spread.close();
        let done = copied.map_err(fabric_failure)?;
        closed.map_err(fabric_failure)?;
        tracing::info!(
            chunks = done.chunks,
            "all data are copied to the devices of their placement groups"
        );
        Ok(())
    }

    fn open(&self, layout: &Layout) -> Result<Spread> {
        let owner = Owner {
            cluster: self.record.cluster,
            has_peers: false,
            stores_data: true,
        };
        let selection = devices::select(&self.config, &self.default, &layout.devices, owner)?;
        let names = (self.record.cluster, self.record.node);
        let spread = open(&self.config, names, &selection)?;
        Uses::read(&self.config.data)?.check_each(spread.uses())?;
        Ok(spread)
    }

    /// The node is alone still: it can go on as it was.
    fn with_way_back(&self, failure: Failure) -> Failure {
        let way_back = format!(
            "to go on alone, as before `penstock init`, move {} away",
            self.config.data.join("cluster").display()
        );
        let hint = match &failure.hint {
            None => way_back,
            Some(hint) => format!("{hint}; {way_back}"),
        };
        Failure {
            hint: Some(hint),
            ..failure
        }
    }
}

/// Opens the stores among the devices: what is to be made anew has nothing yet.
fn open(
    config: &Prepared,
    (cluster, node): (Uuid, NodeId),
    selection: &DeviceSelection,
) -> Result<Spread> {
    let there = selection.stores.iter().map(|(path, _)| DeviceConfig {
        path: path.clone(),
        missing: Missing::Refuse,
    });
    let there: Vec<DeviceConfig> = there.collect();
    let store = StoreKind::Devices(there.clone());
    let mut options = FabricConfig::new(node, Incarnation(0), *cluster.as_bytes(), store);
    options.opened = config.opened.clone();
    Spread::open(&there, &options).map_err(fabric_failure)
}

/// What does not go into copies: maps, and the metadata beside them.
const HOST_SPARE_BYTES: u64 = 64 << 20;

/// Sparse device files grow by what they receive: the file systems below them must have room for that.
fn refuse_without_host_room(comes: &[(PathBuf, u64)]) -> Result<()> {
    let mut growing: Vec<(u64, &Path, u64)> = Vec::new();
    for (path, bytes) in comes {
        let about = std::fs::metadata(path);
        let about = about.context(|| format!("look at {}", path.display()))?;
        // A block of the map for 31 of data is more than enough where chunks are not nearly empty.
        let grows = holes(&about).min(bytes + bytes / 32);
        if !about.is_file() || grows == 0 {
            continue;
        }
        match growing.iter_mut().find(|(fs, ..)| *fs == about.dev()) {
            Some((.., sum)) => *sum += grows,
            None => growing.push((about.dev(), path, grows)),
        }
    }
    for (_, path, grows) in growing {
        let free = free_bytes(path)?;
        if grows + HOST_SPARE_BYTES > free {
            return Err(Failure::new(
                Kind::NoSpace,
                format!(
                    "the file system of device {} has {} MiB left, and is to take {} MiB of data and {} MiB \
                     beside them",
                    path.display(),
                    free >> 20,
                    grows >> 20,
                    HOST_SPARE_BYTES >> 20
                ),
                "make room there: what the data take where they are now is freed afterwards",
            ));
        }
    }
    Ok(())
}

/// Tells the devices that this node is one of several, now that its metadata say so. Before the stores are
/// opened for good.
pub async fn settle_if_due(
    config: &Prepared,
    meta: &Meta,
    selection: &DeviceSelection,
) -> Result<()> {
    let Some(record) = record(config)? else {
        return Ok(());
    };
    let layout = Layout::of(&meta.map(), record.node);
    let mut spread = open(config, (record.cluster, record.node), selection)?;
    let data = config.data.clone();
    blocking(move || {
        let homes = |chunk| layout.device_of(chunk);
        let groups = |device: &_| layout.groups_on(device).collect::<Vec<_>>();
        let settled = spread.settle(homes, groups, layout.epoch);
        let closed = spread.close();
        settled.and(closed).map_err(|error| {
            let failure = fabric_failure(error);
            let hint = "mend that and start again: it goes on where it was, and nothing is lost";
            Failure::new(failure.kind, failure.error, hint)
        })?;
        let mut record = record;
        record.has_spread();
        record.store(&data)?;
        tracing::info!("the data are spread over the devices");
        Ok(())
    })
    .await
}

/// Of a node that is to begin alone with a device that was one of a cluster: what is not there lies
/// elsewhere, and would read as zeroes.
pub fn served_in_cluster(path: &Path) -> Failure {
    Failure::new(
        Kind::Conflict,
        format!(
            "device {} was used in a cluster since, and by its metadata this node is alone: they are older",
            path.display()
        ),
        "bring back the data directory as it was in the cluster, with `cluster` and `meta` in it; if that is \
         lost, the node had one device and no other node ever joined, `penstock init` makes it the first of \
         a cluster again; else only metadata from after `penstock init` tell what lies where",
    )
}

fn metadata_failure(error: impl std::fmt::Display) -> Failure {
    Failure::plain(Kind::Failed, error)
}
