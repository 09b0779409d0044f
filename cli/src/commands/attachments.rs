//! Attachments, of volumes and of filesystems.

use api::client::Client;
use api::failure::{Failure, Kind, Result};
use api::types::{Attachment, AttachmentState, ClusterNode, FilesystemAttachment};
use serde::Serialize;

use crate::args::AttachmentListArgs;
use crate::table::Table;

use super::{path_or_name, print, print_json};

/// All of them.
pub struct Attachments {
    /// Those of volumes.
    pub volumes: Vec<Attachment>,
    /// Those of filesystems.
    pub filesystems: Vec<FilesystemAttachment>,
}

/// An attachment of either kind as programs read it. Those of filesystems are known by their field
/// `filesystem`.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    Volume(&'a Attachment),
    Filesystem(&'a FilesystemAttachment),
}

impl Attachments {
    /// Asks the daemon for those of its node.
    pub async fn read(client: &Client) -> Result<Self> {
        Self::read_from(client, "").await
    }

    async fn read_from(client: &Client, query: &str) -> Result<Self> {
        let volumes = format!("/v1/attachments{query}");
        let filesystems = format!("/v1/filesystem-attachments{query}");
        let (volumes, filesystems) = client.get_both(&volumes, &filesystems).await?;
        Ok(Self {
            volumes,
            filesystems,
        })
    }

    /// Those that a listing is to have.
    async fn listed(args: &AttachmentListArgs, client: &Client) -> Result<Self> {
        if !args.all && args.node.is_none() {
            return Self::read(client).await;
        }
        let mut all = Self::read_from(client, "?everywhere=true").await?;
        if let Some(node) = &args.node {
            let name = node_name(client, node).await?;
            all.volumes.retain(|one| one.node == name);
            all.filesystems.retain(|one| one.node == name);
        }
        Ok(all)
    }

    fn entries(&self) -> Vec<Entry<'_>> {
        let volumes = self.volumes.iter().map(Entry::Volume);
        let filesystems = self.filesystems.iter().map(Entry::Filesystem);
        volumes.chain(filesystems).collect()
    }

    /// The socket or name that somebody typed: as an absolute path if it is the relative one of a socket.
    pub fn target(&self, typed: &str) -> Result<String> {
        let volumes = self.volumes.iter().map(|one| one.socket.as_str());
        let filesystems = self.filesystems.iter().map(|one| one.socket.as_str());
        let is_name = self.volumes.iter().any(|one| one.volume == typed)
            || self.filesystems.iter().any(|one| one.filesystem == typed);
        path_or_name("socket", typed, is_name, volumes.chain(filesystems))
    }

    /// The attachment of a filesystem that a socket or name means; none if it means none of a filesystem.
    ///
    /// # Errors
    /// It means more than one attachment.
    pub fn filesystem(&self, target: &str) -> Result<Option<&FilesystemAttachment>> {
        let meant = |one: &&FilesystemAttachment| one.socket == target || one.filesystem == target;
        let found: Vec<_> = self.filesystems.iter().filter(meant).collect();
        let Some(first) = found.first().copied() else {
            return Ok(None);
        };
        if let Some(volume) = self.volumes.iter().find(|one| one.volume == target) {
            return Err(Failure::new(
                Kind::Conflict,
                format!("a volume and a filesystem are called '{target}', and both are attached"),
                format!(
                    "name the socket: {} for the volume, {} for the filesystem",
                    volume.socket, first.socket
                ),
            ));
        }
        if found.len() > 1 {
            let sockets: Vec<_> = found.iter().map(|one| one.socket.as_str()).collect();
            return Err(Failure::new(
                Kind::Conflict,
                format!(
                    "filesystem '{target}' is attached on {} sockets",
                    found.len()
                ),
                format!("name one: {}", sockets.join(", ")),
            ));
        }
        Ok(Some(first))
    }

    fn table(&self) -> Table {
        let mut table = Table::new([
            "TYPE", "NAME", "NODE", "SOCKET", "STATE", "QUEUES", "MODE", ">READS", ">WRITES",
            ">ERRORS",
        ]);
        for a in &self.volumes {
            let state = match (a.state, &a.offer) {
                (AttachmentState::Listening | AttachmentState::Connected, _) if a.incoming => {
                    "incoming".to_owned()
                }
                (state, Some(offer)) => format!("{}, offered to {}", state_word(state), offer.to),
                (state, None) => state_word(state).to_owned(),
            };
            table.row([
                "volume".to_owned(),
                a.volume.clone(),
                a.node.clone(),
                a.socket.clone(),
                state,
                format!("{}/{}", a.queues_running, a.queues),
                mode(a.read_only).to_owned(),
                a.counters.reads.to_string(),
                a.counters.writes.to_string(),
                a.counters.errors.to_string(),
            ]);
        }
        let not_counted = || "-".to_owned();
        for a in &self.filesystems {
            table.row([
                "fs".to_owned(),
                a.filesystem.clone(),
                a.node.clone(),
                a.socket.clone(),
                state_word(a.state).to_owned(),
                a.queues.to_string(),
                mode(a.read_only).to_owned(),
                not_counted(),
                not_counted(),
                not_counted(),
            ]);
        }
        table
    }
}

/// The name of a node that somebody named, also by its number.
async fn node_name(client: &Client, typed: &str) -> Result<String> {
    let nodes: Vec<ClusterNode> = client.get_beside("/v1/nodes").await?;
    let by_name = nodes.iter().find(|node| node.name == typed);
    let by_number = || nodes.iter().find(|node| node.id.to_string() == typed);
    let found = by_name.or_else(by_number).map(|node| node.name.clone());
    found.ok_or_else(|| {
        Failure::new(
            Kind::NotFound,
            format!("there is no node '{typed}'"),
            "see `penstock node list`",
        )
    })
}

/// `penstock attachments list`.
pub async fn list(args: &AttachmentListArgs, client: &Client, json: bool) -> Result<()> {
    let all = Attachments::listed(args, client).await?;
    if json {
        return print_json(&all.entries());
    }
    print(|mut out| all.table().print(&mut out))
}

/// The word for a state.
pub fn state_word(state: AttachmentState) -> &'static str {
    match state {
        AttachmentState::Listening => "listening",
        AttachmentState::Connected => "connected",
        AttachmentState::Detaching => "detaching",
        AttachmentState::Failed => "failed",
        AttachmentState::Elsewhere => "elsewhere",
    }
}

/// The word for whether guests may write.
pub fn mode(is_read_only: bool) -> &'static str {
    match is_read_only {
        true => "ro",
        false => "rw",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::types::{Counters, Offer};

    fn volume(name: &str, socket: &str) -> Attachment {
        Attachment {
            node: "one".to_owned(),
            socket: socket.to_owned(),
            volume: name.to_owned(),
            queues: 4,
            queue_size: 128,
            read_only: false,
            pin_memory: true,
            write_through: false,
            incoming: false,
            expires_at_ms: None,
            offer: None,
            block_device: None,
            takeover_pause_ms: None,
            state: AttachmentState::Connected,
            queues_running: 2,
            last_error: None,
            counters: Counters::default(),
        }
    }

    fn filesystem(name: &str, socket: &str) -> FilesystemAttachment {
        FilesystemAttachment {
            filesystem: name.to_owned(),
            socket: socket.to_owned(),
            node: "one".to_owned(),
            tag: "tag".to_owned(),
            queues: 1,
            read_only: true,
            state: AttachmentState::Listening,
            error: None,
        }
    }

    fn attachments() -> Attachments {
        Attachments {
            volumes: vec![
                volume("web", "/run/web.sock"),
                volume("both", "/run/disk.sock"),
            ],
            filesystems: vec![
                filesystem("home", "/run/home.sock"),
                filesystem("both", "/run/tree.sock"),
                filesystem("tree", "/run/a.sock"),
                filesystem("tree", "/run/b.sock"),
            ],
        }
    }

    #[test]
    fn a_target_means_one_attachment_or_says_which_there_are() {
        let all = attachments();
        let socket = |target: &str| {
            all.filesystem(target)
                .unwrap()
                .map(|one| one.socket.as_str())
        };
        assert_eq!(socket("web"), None);
        assert_eq!(socket("/run/web.sock"), None);
        assert_eq!(socket("nothing"), None);
        assert_eq!(socket("home"), Some("/run/home.sock"));
        assert_eq!(socket("/run/b.sock"), Some("/run/b.sock"));
        assert_eq!(socket("/run/tree.sock"), Some("/run/tree.sock"));
        let both = all.filesystem("both").unwrap_err();
        assert!(both.error.contains("'both'"), "{both}");
        let hint = both.hint.unwrap();
        assert!(
            hint.contains("/run/disk.sock") && hint.contains("/run/tree.sock"),
            "{hint}"
        );
        let several = all.filesystem("tree").unwrap_err();
        assert!(
            several.error.contains("'tree' is attached on 2 sockets"),
            "{several}"
        );
        assert_eq!(several.hint.unwrap(), "name one: /run/a.sock, /run/b.sock");
    }

    #[test]
    fn programs_read_volumes_as_before_and_filesystems_by_their_field() {
        let all = attachments();
        let json = serde_json::to_value(all.entries()).unwrap();
        assert_eq!(json[0], serde_json::to_value(&all.volumes[0]).unwrap());
        assert_eq!(json[2]["filesystem"], "home");
        assert!(json[2].get("volume").is_none(), "{json}");
        assert_eq!(json.as_array().unwrap().len(), 6);
    }

    #[test]
    fn the_list_shows_offered_and_incoming_attachments() {
        let offer = Offer {
            to: "two".to_owned(),
            expires_at_ms: 1,
        };
        let all = Attachments {
            volumes: vec![
                Attachment {
                    offer: Some(offer),
                    ..volume("web", "/a")
                },
                Attachment {
                    incoming: true,
                    ..volume("db", "/b")
                },
            ],
            filesystems: Vec::new(),
        };
        let mut out = Vec::new();
        all.table().print(&mut out).unwrap();
        let out = String::from_utf8(out).unwrap();
        assert!(
            out.contains("/a      connected, offered to two  2/4"),
            "{out}"
        );
        assert!(out.contains("/b      incoming  "), "{out}");
    }

    #[test]
    fn people_see_both_kinds_in_one_table() {
        let all = Attachments {
            volumes: vec![volume("web", "/run/web.sock")],
            filesystems: vec![filesystem("home", "/run/home.sock")],
        };
        let mut out = Vec::new();
        all.table().print(&mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "TYPE    NAME  NODE  SOCKET          STATE      QUEUES  MODE  READS  WRITES  ERRORS\n\
             volume  web   one   /run/web.sock   connected  2/4     rw        0       0       0\n\
             fs      home  one   /run/home.sock  listening  1       ro        -       -       -\n"
        );
    }
}
