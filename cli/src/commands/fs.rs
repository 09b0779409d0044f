//! `penstock fs …`.

use std::io::{self, Write};

use api::client::{Client, encode};
use api::failure::Result;
use api::size::Size;
use api::types::{Filesystem, FilesystemAttachment, FilesystemCreate};
use hyper::Method;

use crate::args::FsCommand;
use crate::table::Table;

use super::attachments::{mode, state_word};
use super::{confirm, print, print_json};

const FILESYSTEMS: &str = "/v1/filesystems";

/// Runs a verb.
pub async fn run(verb: FsCommand, client: &Client, json: bool) -> Result<()> {
    match verb {
        FsCommand::Create { name, pool } => create(client, json, name, pool).await,
        FsCommand::List => list(client, json).await,
        FsCommand::Show { name } => show(&get(client, &name).await?, json),
        FsCommand::Delete { name, yes } => delete(client, json, &name, yes).await,
    }
}

/// The names of all filesystems.
pub async fn names(client: &Client) -> Result<Vec<String>> {
    let all: Vec<Filesystem> = client.get(FILESYSTEMS).await?;
    Ok(all.into_iter().map(|one| one.name).collect())
}

fn path_of(name: &str) -> String {
    format!("{FILESYSTEMS}/{}", encode(name))
}

async fn get(client: &Client, name: &str) -> Result<Filesystem> {
    client.get(&path_of(name)).await
}

async fn create(client: &Client, json: bool, name: String, pool: Option<String>) -> Result<()> {
    let request = FilesystemCreate { name, pool };
    let made: Filesystem = client.call(Method::POST, FILESYSTEMS, &request).await?;
    if json {
        return print_json(&made);
    }
    eprintln!(
        "penstock: filesystem {} created in pool {}",
        made.name, made.pool
    );
    Ok(())
}

async fn delete(client: &Client, json: bool, name: &str, yes: bool) -> Result<()> {
    let filesystem = get(client, name).await?;
    let what = format!(
        "delete filesystem '{name}'{} and all files in it",
        holds(&filesystem)
    );
    confirm::confirm(&what, yes)?;
    client.delete(&path_of(name)).await?;
    if json {
        return print_json(&filesystem);
    }
    eprintln!(
        "penstock: filesystem {name} is being deleted: its files are removed in the background, and then its \
         name is free"
    );
    Ok(())
}

/// How much is in a filesystem, in parentheses; nothing if that is not known.
fn holds(filesystem: &Filesystem) -> String {
    match (filesystem.inodes, filesystem.named_bytes) {
        (Some(inodes), Some(bytes)) => format!(" ({inodes} inodes, {})", Size(bytes)),
        _ => String::new(),
    }
}

async fn list(client: &Client, json: bool) -> Result<()> {
    let filesystems: Vec<Filesystem> = client.get(FILESYSTEMS).await?;
    if json {
        return print_json(&filesystems);
    }
    let mut table = Table::new([
        "NAME",
        "POOL",
        "STATE",
        ">INODES",
        ">DATA",
        ">TO FREE",
        ">ATTACHED",
    ]);
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), |b| Size(b).to_string());
    for one in &filesystems {
        table.row([
            one.name.clone(),
            one.pool.clone(),
            one.state.word().to_owned(),
            one.inodes.map_or_else(|| "-".to_owned(), |n| n.to_string()),
            size(one.named_bytes),
            size(one.freed_bytes),
            one.attachments.len().to_string(),
        ]);
    }
    for one in &filesystems {
        if let Some(problem) = &one.problem {
            eprintln!("penstock: warning: filesystem {}: {problem}", one.name);
        }
    }
    print(|mut out| table.print(&mut out))
}

fn show(filesystem: &Filesystem, json: bool) -> Result<()> {
    match json {
        true => print_json(filesystem),
        false => print(|out| write_shown(filesystem, out)),
    }
}

fn write_shown(filesystem: &Filesystem, out: &mut dyn Write) -> io::Result<()> {
    let unknown = || "unknown".to_owned();
    let size =
        |bytes: Option<u64>| bytes.map_or_else(unknown, |b| format!("{} ({b} bytes)", Size(b)));
    writeln!(out, "name        {}", filesystem.name)?;
    writeln!(out, "id          {}", filesystem.id)?;
    writeln!(out, "pool        {}", filesystem.pool)?;
    writeln!(out, "state       {}", filesystem.state.word())?;
    writeln!(out, "names on    {}", keepers(filesystem))?;
    let inodes = filesystem.inodes.map(|n| n.to_string());
    writeln!(out, "inodes      {}", inodes.unwrap_or_else(unknown))?;
    writeln!(out, "data        {}", size(filesystem.named_bytes))?;
    writeln!(out, "to free     {}", size(filesystem.freed_bytes))?;
    match filesystem.sessions.as_deref() {
        None => writeln!(out, "sessions    unknown")?,
        Some([]) => writeln!(out, "sessions    -")?,
        Some(sessions) => {
            for session in sessions {
                writeln!(out, "session     {}, since {}", session.node, session.since)?;
            }
        }
    }
    let held = filesystem.capabilities.map(|n| n.to_string());
    writeln!(out, "cached      {}", held.unwrap_or_else(unknown))?;
    if filesystem.attachments.is_empty() {
        writeln!(out, "attached    -")?;
    }
    for attachment in &filesystem.attachments {
        writeln!(out, "attached    {}", attachment_line(attachment))?;
    }
    writeln!(out, "created     {}", filesystem.created_at)?;
    match &filesystem.problem {
        Some(problem) => writeln!(out, "problem     {problem}"),
        None => Ok(()),
    }
}

/// The nodes that keep its names, and which of them leads.
fn keepers(filesystem: &Filesystem) -> String {
    let leader = filesystem.leader.as_ref();
    let keepers = filesystem.names_on.iter().map(|node| match leader {
        Some(leader) if leader == node => format!("{node} (leads)"),
        _ => node.clone(),
    });
    match filesystem.names_on.is_empty() {
        true => "-".to_owned(),
        false => keepers.collect::<Vec<_>>().join(", "),
    }
}

fn attachment_line(attachment: &FilesystemAttachment) -> String {
    let error = attachment.error.iter().map(|error| format!(": {error}"));
    format!(
        "{} on {}, tag {}, {}, {}{}",
        attachment.socket,
        attachment.node,
        attachment.tag,
        mode(attachment.read_only),
        state_word(attachment.state),
        error.collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use meta::UnixMillis;

    use super::*;
    use api::types::{AttachmentState, FilesystemSession, FilesystemState};

    fn filesystem() -> Filesystem {
        let since = UnixMillis(1_700_000_000_000).into();
        Filesystem {
            name: "home".to_owned(),
            id: "5e0a".to_owned(),
            pool: "default".to_owned(),
            state: FilesystemState::Ready,
            names_on: vec!["one".to_owned(), "two".to_owned()],
            leader: Some("two".to_owned()),
            inodes: Some(3),
            named_bytes: Some(8192),
            freed_bytes: Some(0),
            sessions: Some(vec![FilesystemSession {
                node: "one".to_owned(),
                since,
            }]),
            capabilities: Some(12),
            problem: None,
            attachments: vec![FilesystemAttachment {
                filesystem: "home".to_owned(),
                socket: "/run/penstock/home.sock".to_owned(),
                node: "one".to_owned(),
                tag: "home".to_owned(),
                queues: 1,
                read_only: true,
                state: AttachmentState::Failed,
                error: Some("no memory".to_owned()),
            }],
            created_at: since,
        }
    }

    fn shown(filesystem: &Filesystem) -> String {
        let mut out = Vec::new();
        write_shown(filesystem, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_filesystem_is_shown_with_who_uses_it() {
        assert_eq!(
            shown(&filesystem()),
            "name        home\n\
             id          5e0a\n\
             pool        default\n\
             state       ready\n\
             names on    one, two (leads)\n\
             inodes      3\n\
             data        8K (8192 bytes)\n\
             to free     0 (0 bytes)\n\
             session     one, since 2023-11-14T22:13:20Z\n\
             cached      12\n\
             attached    /run/penstock/home.sock on one, tag home, ro, failed: no memory\n\
             created     2023-11-14T22:13:20Z\n"
        );
        assert_eq!(holds(&filesystem()), " (3 inodes, 8K)");
    }

    #[test]
    fn what_its_group_does_not_tell_is_unknown() {
        let silent = Filesystem {
            names_on: Vec::new(),
            leader: None,
            inodes: None,
            named_bytes: None,
            freed_bytes: None,
            sessions: None,
            capabilities: None,
            problem: Some("namespace group 2 has no leader".to_owned()),
            attachments: Vec::new(),
            ..filesystem()
        };
        let text = shown(&silent);
        assert!(
            text.contains("names on    -\ninodes      unknown\n"),
            "{text}"
        );
        assert!(
            text.contains("sessions    unknown\ncached      unknown\nattached    -\n"),
            "{text}"
        );
        assert!(
            text.ends_with("problem     namespace group 2 has no leader\n"),
            "{text}"
        );
        assert_eq!(holds(&silent), "");
    }
}
