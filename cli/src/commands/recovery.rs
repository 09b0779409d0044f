//! `meta backup|restore|resume|forget-unknown`, `cluster recover|rejoin`: `docs/OPERATIONS.md` is how they
//! are used.

mod backup;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use api::client::Client;
use api::failure::{Context, Failure, Kind, Result};
use api::types::Resume;
use config::datadir::{self, DataDir};
use config::identity::{self, Identity, Record, Settings};
use config::{Config, StoreKind};
use hyper::Method;
use meta::pki::{ClusterCa, NodeKey};
use meta::recovery::{self, Authority, Backup, Position, RecoveryError};
use meta::{NodeId, Role};
use sandbox::become_owner;
use serde::Serialize;
use uuid::Uuid;

use crate::args::{ClusterCommand, Global, MetaCommand, PeerArgs, RejoinArgs, RestoreArgs};

use super::join::{pki_failure, read_config};
use super::{confirm, locate, print, print_json, runtime};

/// What a node that does not run has.
#[derive(Serialize)]
struct Shown {
    cluster: Uuid,
    node: u64,
    /// Term and index of the last entry of the log.
    entry: String,
    epoch: u64,
    nodes: Vec<ShownNode>,
    filesystems: Vec<ShownFilesystem>,
}

#[derive(Serialize)]
struct ShownFilesystem {
    name: String,
    /// Term and index of the last entry of the log that its names are kept by; none if they are not here.
    entry: Option<String>,
}

#[derive(Serialize)]
struct ShownNode {
    node: u64,
    name: String,
    votes: bool,
}

/// What was begun.
#[derive(Serialize)]
struct Begun {
    cluster: Uuid,
    node: u64,
    history: Uuid,
}

/// `penstock meta …`.
pub fn meta(verb: MetaCommand, global: &Global) -> Result<()> {
    match verb {
        MetaCommand::Restore(args) => restore(args, global),
        MetaCommand::Backup { file, force } => {
            runtime()?.block_on(backup::write(&file, force, global))
        }
        MetaCommand::Resume {
            without_missing,
            yes,
        } => runtime()?.block_on(resume(without_missing, yes, global)),
        MetaCommand::ForgetUnknown { yes } => runtime()?.block_on(forget_unknown(yes, global)),
    }
}

/// `penstock cluster …`.
pub fn cluster(verb: ClusterCommand, global: &Global) -> Result<()> {
    match verb {
        ClusterCommand::Recover {
            accept_data_loss,
            choose_replicas,
            config,
        } => recover(
            config.as_deref(),
            (accept_data_loss, choose_replicas),
            global,
        ),
        ClusterCommand::Rejoin(args) => rejoin(args, global),
    }
}

async fn resume(without_missing: bool, yes: bool, global: &Global) -> Result<()> {
    let what = match without_missing {
        true => "go on without the devices that are not back, for good",
        false => {
            "decide now which replicas count, also if nodes joined after the backup and are not here"
        }
    };
    confirm::confirm(what, yes)?;
    let client: Client = locate::client(global).await?;
    let ask = Resume { without_missing };
    let _: () = client.call(Method::POST, "/v1/meta/resume", &ask).await?;
    eprintln!("penstock: I/O goes on; `penstock health` shows what is still to be copied");
    Ok(())
}

async fn forget_unknown(yes: bool, global: &Global) -> Result<()> {
    confirm::confirm(
        "delete all data of volumes that the metadata do not know",
        yes,
    )?;
    let client: Client = locate::client(global).await?;
    let _: () = client
        .call(Method::POST, "/v1/meta/forget-unknown", &())
        .await?;
    eprintln!("penstock: their space is given back in the next minutes");
    Ok(())
}

/// A node that does not run: nobody else may start it meanwhile.
struct Stopped {
    config: Config,
    meta_dir: PathBuf,
    _data: DataDir,
}

impl Stopped {
    fn take(file: Option<&Path>, peers: PeerArgs, global: &Global) -> Result<Self> {
        let config = read_config(file, peers, global.data_dir())?;
        become_owner(&config.data)?;
        let data = DataDir::take(&config.data)?;
        let meta_dir = datadir::meta(&config.data, StoreKind::File);
        Ok(Self {
            config,
            meta_dir,
            _data: data,
        })
    }

    fn identity(&self) -> Result<Option<Identity>> {
        Identity::load(&self.config.data)
    }

    /// Where metadata are made of a backup, without what an interrupted restore left there.
    fn place_to_restore(&self) -> Result<PathBuf> {
        let made = self.config.data.join("meta.restored");
        if made.exists() {
            fs::remove_dir_all(&made).context(|| format!("remove {}", made.display()))?;
        }
        Ok(made)
    }

    /// Where the node's metadata go that it does not need any more: nothing is deleted.
    fn put_away(&self) -> Result<()> {
        if !self.meta_dir.exists() {
            return Ok(());
        }
        let mut number = 1;
        let away = loop {
            let away = self.config.data.join(format!("meta.before-{number}"));
            if !away.exists() {
                break away;
            }
            number += 1;
        };
        fs::rename(&self.meta_dir, &away)
            .context(|| format!("rename {}", self.meta_dir.display()))?;
        sync_dir(&self.config.data)?;
        eprintln!("penstock: the metadata of before are in {}", away.display());
        Ok(())
    }
}

fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .context(|| format!("write {}", dir.display()))
}

fn recovery_failure(error: RecoveryError) -> Failure {
    failure_with_hint(error, "do it on one of those")
}

/// The same for a node that is to go on alone.
fn go_on_failure(error: RecoveryError) -> Failure {
    let hint =
        "recover on one of those; if this node has newer metadata, add --choose-replicas there";
    failure_with_hint(error, hint)
}

/// What failed, and what to do if the node may not lead.
fn failure_with_hint(error: RecoveryError, hint: &str) -> Failure {
    match &error {
        RecoveryError::NoMetadata { .. } | RecoveryError::UnknownNode { .. } => {
            Failure::plain(Kind::NotFound, error)
        }
        RecoveryError::NotMeta { .. } => Failure::new(Kind::Denied, error, hint),
        _ => Failure::plain(Kind::Failed, error),
    }
}

fn no_node(config: &Config) -> Failure {
    Failure::new(
        Kind::NotFound,
        format!(
            "{} holds no node of a cluster of several",
            config.data.display()
        ),
        "name its data directory with --data",
    )
}

fn recover(file: Option<&Path>, (accept, choose): (bool, bool), global: &Global) -> Result<()> {
    let node = Stopped::take(file, PeerArgs::default(), global)?;
    let mut identity = node.identity()?.ok_or_else(|| no_node(&node.config))?;
    let position = recovery::position(&node.meta_dir).map_err(recovery_failure)?;
    if !accept {
        return show(&position, global.json);
    }
    // Before anything is changed: a node that is turned away by all cannot go back.
    position.check().map_err(go_on_failure)?;
    let history = Uuid::new_v4();
    let settings = identity.record.settings.clone().with(&node.config.peers);
    // First, so that a crash leaves a node that nobody talks to, and not one that talks to both.
    identity.record.history = Some(history);
    identity.record.store(&node.config.data)?;
    let address = settings.control().to_string();
    let begun = recovery::go_on_alone(&node.meta_dir, &address, (history, choose));
    begun.map_err(go_on_failure)?;
    told(&identity.record, history, global.json)?;
    eprintln!(
        "penstock: then remove each node that is gone, with `penstock node remove NODE --accept-data-loss`"
    );
    if choose {
        eprintln!(
            "penstock: when all devices that are left are back, `penstock meta resume` lets I/O go on; until \
             then it waits"
        );
    }
    Ok(())
}

fn show(position: &Position, json: bool) -> Result<()> {
    let of = |node: &meta::Node| ShownNode {
        node: node.id.0,
        name: node.name.to_string(),
        votes: position.voters.contains(&node.id),
    };
    let entry = |(term, index): (u64, u64)| format!("{term}.{index}");
    let filesystems = position
        .filesystems
        .iter()
        .map(|(name, last)| ShownFilesystem {
            name: name.clone(),
            entry: last.map(entry),
        });
    let shown = Shown {
        cluster: position.cluster,
        node: position.node.0,
        filesystems: filesystems.collect(),
        entry: entry(position.last),
        epoch: position.epoch.0,
        nodes: position.nodes.iter().map(of).collect(),
    };
    if json {
        return print_json(&shown);
    }
    let names = shown.nodes.iter().map(|one| {
        let votes = if one.votes { " (votes)" } else { "" };
        format!("{} {}{votes}", one.node, one.name)
    });
    let names = names.collect::<Vec<_>>().join(", ");
    print(|out| {
        writeln!(out, "cluster {}, node {}", shown.cluster, shown.node)?;
        writeln!(out, "last entry {}, map {}", shown.entry, shown.epoch)?;
        writeln!(out, "nodes {names}")?;
        for filesystem in &shown.filesystems {
            let name = &filesystem.name;
            match &filesystem.entry {
                Some(entry) => writeln!(out, "filesystem {name}, last entry {entry}")?,
                None => writeln!(out, "filesystem {name}: its names are not on this node")?,
            }
        }
        Ok(())
    })?;
    eprintln!(
        "penstock: nothing was done. If a majority of the nodes that vote is gone for good: stop the daemons \
         of all nodes that are left, run this on each of them, and on the one with the greatest last entry \
         (first number first) repeat it with --accept-data-loss. What only the lost nodes had is lost then, \
         also all files of a filesystem whose names are not on that node; if they ever come back they must \
         not be started"
    );
    Ok(())
}

/// What is to be done on the others.
fn told(record: &Record, history: Uuid, json: bool) -> Result<()> {
    let begun = Begun {
        cluster: record.cluster,
        node: record.node.0,
        history,
    };
    match json {
        true => print_json(&begun)?,
        false => print(|out| writeln!(out, "{history}"))?,
    }
    eprintln!(
        "penstock: start this node; on each other node that is left, run `penstock cluster rejoin {history}` \
         while its daemon does not run, and start it"
    );
    Ok(())
}

fn rejoin(args: RejoinArgs, global: &Global) -> Result<()> {
    let history = args.history;
    let backup = args.backup.as_deref().map(read_backup).transpose()?;
    let node = Stopped::take(args.config.as_deref(), args.peers, global)?;
    let data = &node.config.data;
    let mut identity = match (node.identity()?, backup) {
        (Some(identity), _) => {
            refuse_other_number(&identity.record, args.node)?;
            identity
        }
        (None, None) => return Err(no_node(&node.config)),
        (None, Some(backup)) => {
            let mut identity = identity_from(&backup, args.node, &node)?;
            identity.record.history = Some(history);
            identity.store(data)?;
            identity
        }
    };
    if identity.record.history == Some(history) && meta::MetaNode::exists(&node.meta_dir) {
        eprintln!("penstock: this node follows that history already");
        return Ok(());
    }
    // In this order: until the last step the daemon does not start without its metadata.
    node.put_away()?;
    identity.record.history = Some(history);
    identity.record.bootstrap = None;
    identity.record.store(data)?;
    identity::note_rejoins(data)?;
    if global.json {
        let record = &identity.record;
        return print_json(&Begun {
            cluster: record.cluster,
            node: record.node.0,
            history,
        });
    }
    eprintln!(
        "penstock: start this node: it gets the metadata from the others, and keeps its number and devices"
    );
    Ok(())
}

fn read_backup(file: &Path) -> Result<Backup> {
    Backup::read(file).map_err(|error| {
        Failure::new(
            Kind::Invalid,
            format!("{}: {error}", file.display()),
            "name a file that `penstock meta backup` wrote",
        )
    })
}

fn restore(args: RestoreArgs, global: &Global) -> Result<()> {
    let backup = read_backup(&args.file)?;
    if !args.accept_data_loss {
        return backup::show(&backup.header, global.json);
    }
    let number = args.node;
    let node = Stopped::take(args.config.as_deref(), args.peers, global)?;
    if backup.header.is_alone() {
        return restore_alone(&node, &backup, global);
    }
    let (identity, is_new) = match node.identity()? {
        Some(identity) => (identity, false),
        None => (identity_from(&backup, number, &node)?, true),
    };
    refuse_other_number(&identity.record, number)?;
    let (found, expected) = (identity.record.cluster, backup.header.cluster);
    if found != expected {
        return Err(Failure::new(
            Kind::Conflict,
            format!("the backup is of cluster {expected}, and this node of {found}"),
            "restore the backup of this cluster, or name another data directory with --data",
        ));
    }
    restore_to(&node, &backup, identity, is_new, global)
}

fn restore_to(
    node: &Stopped,
    backup: &Backup,
    mut identity: Identity,
    is_new: bool,
    global: &Global,
) -> Result<()> {
    let history = Uuid::new_v4();
    let settings = identity.record.settings.clone().with(&node.config.peers);
    let (id, address) = (identity.record.node, settings.control().to_string());
    let made = node.place_to_restore()?;
    recovery::restore(&made, backup, (id, &address), history).map_err(recovery_failure)?;
    identity.record.history = Some(history);
    match is_new {
        true => identity.store(&node.config.data)?,
        // Before the metadata, so that a crash leaves a node that nobody talks to.
        false => identity.record.store(&node.config.data)?,
    }
    put_in_place(node, &made)?;
    told(&identity.record, history, global.json)?;
    eprintln!(
        "penstock: when all devices are back, `penstock meta resume` lets I/O go on; until then it waits"
    );
    Ok(())
}

/// A node that is a cluster of its own.
fn restore_alone(node: &Stopped, backup: &Backup, global: &Global) -> Result<()> {
    if node.identity()?.is_some() {
        return Err(Failure::new(
            Kind::Conflict,
            "the backup is of a node without peers, and this data directory holds a node of a cluster",
            "name another data directory with --data",
        ));
    }
    let made = node.place_to_restore()?;
    let (history, id) = (Uuid::new_v4(), backup.header.node);
    recovery::restore(&made, backup, (id, ""), history).map_err(recovery_failure)?;
    put_in_place(node, &made)?;
    let (cluster, node) = (backup.header.cluster, id.0);
    match global.json {
        true => print_json(&Begun {
            cluster,
            node,
            history,
        })?,
        false => eprintln!(
            "penstock: start this node with `penstock serve`; when all its devices are there, `penstock meta \
             resume` lets I/O go on; until then it waits"
        ),
    }
    Ok(())
}

fn put_in_place(node: &Stopped, made: &Path) -> Result<()> {
    node.put_away()?;
    fs::rename(made, &node.meta_dir).context(|| format!("rename {}", made.display()))?;
    sync_dir(&node.config.data)
}

/// Refuses to take a node for another one.
fn refuse_other_number(own: &Record, number: Option<u64>) -> Result<()> {
    match number.filter(|number| *number != own.node.0) {
        None => Ok(()),
        Some(number) => Err(Failure::new(
            Kind::Conflict,
            format!(
                "this data directory holds node {}, not node {number}",
                own.node
            ),
            "leave --node out, or name another data directory with --data",
        )),
    }
}

/// The identity of a node whose data directory is lost, made anew with the authority's key. The node is what
/// it was when the backup was taken, unless told otherwise.
fn identity_from(backup: &Backup, number: Option<u64>, node: &Stopped) -> Result<Identity> {
    let config = &node.config;
    let Some(number) = number else {
        return Err(Failure::new(
            Kind::NotFound,
            format!(
                "{} holds no node, and nobody said which one this is",
                config.data.display()
            ),
            "name its data directory with --data; if that is lost, add --node NUMBER and --listen ADDRESS",
        ));
    };
    let Some(Authority { certificate, key }) = &backup.header.authority else {
        return Err(Failure::new(
            Kind::Invalid,
            "the backup does not hold the key by which nodes are let in, so no identity can be made",
            "restore on a node whose data directory is left, or a backup that was taken on a node with the \
             role meta",
        ));
    };
    let (cluster, id) = (backup.header.cluster, NodeId(number));
    let known = recovery::known_node(backup, id, &node.place_to_restore()?);
    let settings = Settings::from_known_node(&known.map_err(recovery_failure)?, &config.peers)?;
    let keeps_key = settings.roles.contains(&Role::Meta);
    let ca = ClusterCa::load(cluster, key).map_err(pki_failure)?;
    let node_key = NodeKey::generate().map_err(pki_failure)?;
    Ok(Identity {
        record: Record::new(cluster, id, None, settings),
        ca: certificate.clone(),
        certificate: ca.issue(id, &node_key.public_key()).map_err(pki_failure)?,
        key: node_key.to_pem(),
        ca_key: keeps_key.then(|| key.clone()),
    })
}
