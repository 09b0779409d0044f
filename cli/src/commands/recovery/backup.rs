//! Writes a backup of the metadata, and shows the content of one.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use api::failure::{Context, Failure, Kind, Result};
use api::moment::Moment;
use api::size::Size;
use http_body_util::BodyExt;
use meta::recovery::{Backup, BackupHeader};
use serde::Serialize;
use uuid::Uuid;

use crate::args::Global;

use super::super::{locate, print, print_json};
use super::sync_dir;

/// `penstock meta backup`.
pub async fn write(file: &Path, force: bool, global: &Global) -> Result<()> {
    if file.exists() && !force {
        return Err(Failure::new(
            Kind::Conflict,
            format!("{} exists", file.display()),
            "choose another file, or add --force",
        ));
    }
    let client = locate::client(global).await?;
    let body = client.download("/v1/meta/backup").await?;
    let body = body
        .collect()
        .await
        .map_err(|e| Failure::plain(Kind::Failed, e))?;
    let bytes = body.to_bytes();
    let taken = Backup::parse(&bytes).map_err(|e| Failure::plain(Kind::Failed, e))?;
    // Written to another file first, so that an earlier backup stays until this one is complete.
    let mut partial = file.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let what = || format!("write {}", partial.display());
    match fs::remove_file(&partial) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        removed => removed.context(what)?,
    }
    let mut to = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&partial)
        .context(what)?;
    to.write_all(&bytes)
        .and_then(|()| to.sync_all())
        .context(what)?;
    fs::rename(&partial, file).context(|| format!("write {}", file.display()))?;
    sync_dir(
        file.parent()
            .filter(|dir| !dir.as_os_str().is_empty())
            .unwrap_or(Path::new(".")),
    )?;
    let (shown, size) = (file.display(), bytes.len() as u64);
    match global.json {
        true => print_json(&Written {
            file: &shown.to_string(),
            size_bytes: size,
            backup: ShownBackup::of(&taken.header),
        })?,
        false => eprintln!("penstock: metadata backed up to {shown}, {}", Size(size)),
    }
    match taken.header.authority {
        Some(_) => eprintln!(
            "penstock: {shown} holds the key by which nodes are let into the cluster: keep it where nobody \
             else can read it"
        ),
        None if taken.header.is_alone() => {}
        None => eprintln!(
            "penstock: this node does not have the key by which nodes are let in, so {shown} does not hold \
             it: a backup that is taken on a node with the role meta can replace a lost data directory, too"
        ),
    }
    // The backup is complete even if this query fails.
    if let Ok(names) = super::super::fs::names(&client).await
        && !names.is_empty()
    {
        eprintln!(
            "penstock: the backup has no file names, and a restore loses all filesystems: back up their \
             files from a guest ({})",
            names.join(", ")
        );
    }
    Ok(())
}

/// Content of a backup, shown before a restore.
#[derive(Serialize)]
struct ShownBackup {
    cluster: Uuid,
    node: u64,
    taken_at: Moment,
    version: String,
    lets_nodes_in: bool,
}

/// A written backup.
#[derive(Serialize)]
struct Written<'a> {
    file: &'a str,
    size_bytes: u64,
    #[serde(flatten)]
    backup: ShownBackup,
}

impl ShownBackup {
    fn of(header: &BackupHeader) -> Self {
        Self {
            cluster: header.cluster,
            node: header.node.0,
            taken_at: header.taken_at.into(),
            version: header.version.clone(),
            lets_nodes_in: header.authority.is_some(),
        }
    }
}

/// `penstock meta restore` without `--accept-data-loss`: prints the content of a backup.
pub fn show(header: &BackupHeader, json: bool) -> Result<()> {
    let shown = ShownBackup::of(header);
    if json {
        return print_json(&shown);
    }
    print(|out| {
        writeln!(
            out,
            "cluster {}, taken on node {}",
            shown.cluster, shown.node
        )?;
        writeln!(
            out,
            "taken at {} by version {}",
            shown.taken_at, shown.version
        )
    })?;
    eprintln!(
        "penstock: nothing was done. If the metadata of all nodes are lost: stop the daemons of all nodes, \
         and repeat this with --accept-data-loss on one that keeps metadata. Volumes created since then \
         are unknown afterwards, and volumes deleted since then exist again without their data"
    );
    Ok(())
}
