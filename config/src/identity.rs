//! Who this node is in a cluster of several: made by `penstock init` or `penstock join`, read by `penstock
//! serve`.
//!
//! | file below `DATA/cluster/` | what |
//! |---|---|
//! | `node.json` | [`Record`] |
//! | `ca.pem` | certificate of the cluster's authority |
//! | `node.pem` | certificate of this node |
//! | `node.key` | its key, mode 0600 |
//! | `ca.key` | the authority's key, mode 0600; on nodes with the role `meta` |
//! | `begun` | empty; there once the node has made its metadata |
//! | `rejoins` | empty; there while it is to get them anew, which then go with devices that hold data |
//!
//! All of it but the last two is written to `DATA/cluster.new/`, made durable, and renamed: there is a whole
//! identity or none. What an interrupted `init` or `join` left is removed by the next.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use api::failure::{Context, Failure, Kind, Result};
use meta::{Labels, Name, NodeId, Role};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::files;
use crate::{Peers, Transport, Wire};

/// Port for metadata, unless told otherwise.
const CONTROL_PORT: u16 = 7470;
/// Port for data, likewise.
const DATA_PORT: u16 = 7471;
/// Port at which nodes join, likewise.
const ENROL_PORT: u16 = 7472;
/// What to do about an address that cannot be listened on.
pub const LISTEN_HINT: &str = "see that no other program listens there, that the address is one of this \
    machine, and that this \
                               user may take the port (those below 1024 are root's); --listen, \
                               --control-port, --data-port and \
                               --enrol-port choose others";
/// More than all files of an identity take together.
const REHEARSED_BYTES: usize = 64 << 10;
/// Says that the node has made its metadata: whoever has this and no metadata has lost them.
const BEGUN: &str = "begun";
/// Says that the node gave its metadata up to get them anew from others.
const REJOINS: &str = "rejoins";
/// Version of [`Record`].
const FORMAT: u32 = 1;

/// How a node is reached and what it does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// What it is called.
    pub name: String,
    /// What it does.
    pub roles: BTreeSet<Role>,
    /// Where it stands.
    pub labels: Labels,
    /// Address at which other nodes reach it.
    pub listen: IpAddr,
    /// Port for metadata.
    pub control_port: u16,
    /// Port for data.
    pub data_port: u16,
    /// Port at which nodes join.
    pub enrol_port: u16,
    /// How data travel.
    pub wire: Wire,
    /// By which way they go.
    pub transport: Transport,
}

impl Settings {
    /// Of a node that is to be made.
    pub fn new(peers: &Peers) -> Result<Self> {
        Self::unchecked(peers)?.checked()
    }

    fn unchecked(peers: &Peers) -> Result<Self> {
        let listen = peers.listen.ok_or_else(|| {
            Failure::invalid(
                "at which address do other nodes reach this one?",
                "add --listen ADDRESS, or listen to the configuration",
            )
        })?;
        let settings = Settings {
            name: host_name(),
            roles: Role::all(),
            labels: Labels::default(),
            listen,
            control_port: CONTROL_PORT,
            data_port: DATA_PORT,
            enrol_port: ENROL_PORT,
            wire: Wire::Tls,
            transport: Transport::default(),
        };
        Ok(settings.with(peers))
    }

    fn checked(self) -> Result<Self> {
        self.check_ports(self.roles.contains(&Role::Meta))?;
        Ok(self)
    }

    /// Of a node that is made again: as the others know it, and as is told now.
    pub fn from_known_node(known: &meta::Node, peers: &Peers) -> Result<Self> {
        let port = |address: &str| {
            address
                .parse()
                .ok()
                .map(|address: SocketAddr| address.port())
        };
        let mut peers = peers.clone();
        peers.control_port = peers.control_port.or(port(&known.control_address));
        peers.data_port = peers.data_port.or(port(&known.data_address));
        let settings = Settings {
            name: known.name.to_string(),
            roles: known.roles.clone(),
            labels: known.labels.clone(),
            ..Settings::unchecked(&peers)?
        };
        settings.with(&peers).checked()
    }

    /// Goes on with what is told now.
    pub fn with(mut self, peers: &Peers) -> Self {
        if let Some(name) = &peers.name {
            self.name.clone_from(name);
        }
        if let Some(roles) = &peers.roles {
            self.roles = roles.iter().copied().map(Role::from).collect();
        }
        self.labels.host = peers.labels.host.clone().or(self.labels.host);
        self.labels.rack = peers.labels.rack.clone().or(self.labels.rack);
        self.listen = peers.listen.unwrap_or(self.listen);
        self.control_port = peers.control_port.unwrap_or(self.control_port);
        self.data_port = peers.data_port.unwrap_or(self.data_port);
        self.enrol_port = peers.enrol_port.unwrap_or(self.enrol_port);
        self.wire = peers.wire.unwrap_or(self.wire);
        self.transport = peers.transport.unwrap_or(self.transport);
        self
    }

    /// Where peers reach its metadata service.
    pub fn control(&self) -> SocketAddr {
        SocketAddr::new(self.listen, self.control_port)
    }

    /// Where hosts reach its devices.
    pub fn data(&self) -> SocketAddr {
        SocketAddr::new(self.listen, self.data_port)
    }

    /// Where nodes join.
    pub fn enrol(&self) -> SocketAddr {
        SocketAddr::new(self.listen, self.enrol_port)
    }

    /// Refuses ports that cannot be used, or are one and the same. Whether it `enrols`: else that port is not
    /// used.
    pub fn check_ports(&self, enrols: bool) -> Result<()> {
        let mut ports = vec![("control", self.control_port), ("data", self.data_port)];
        ports.extend(enrols.then_some(("enrol", self.enrol_port)));
        for (nth, (name, port)) in ports.iter().copied().enumerate() {
            if port == 0 {
                return Err(Failure::invalid(
                    format!("the {name} port is 0: other nodes have to know the port"),
                    format!("choose one from 1 to 65535 with --{name}-port"),
                ));
            }
            if let Some((other, _)) = ports[..nth].iter().find(|(_, known)| *known == port) {
                return Err(Failure::invalid(
                    format!("the {other} port and the {name} port are both {port}"),
                    format!("choose another one with --{name}-port"),
                ));
            }
        }
        Ok(())
    }

    /// Refuses addresses that this machine cannot listen on now.
    pub fn check_addresses(&self) -> Result<()> {
        let mut addresses = vec![self.control(), self.data()];
        // Others let nobody in.
        addresses.extend(self.roles.contains(&Role::Meta).then(|| self.enrol()));
        let bind = |address| {
            TcpListener::bind(address).context_hint(|| format!("listen on {address}"), LISTEN_HINT)
        };
        // All at a time: two of them may be the same.
        let bound: Vec<TcpListener> = addresses.into_iter().map(bind).collect::<Result<_>>()?;
        drop(bound);
        Ok(())
    }
}

/// How the first node makes the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bootstrap {
    /// Copies of everything in the default pool.
    pub replicas: u8,
    /// Copies that must be in sync for a write.
    pub min_in_sync: u8,
}

/// What is said in `node.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    format: u32,
    /// The cluster.
    pub cluster: Uuid,
    /// The node's number in it.
    pub node: NodeId,
    /// Of the first node only.
    pub bootstrap: Option<Bootstrap>,
    /// The history of its metadata, after a recovery.
    pub history: Option<Uuid>,
    /// As they were when it was made.
    pub settings: Settings,
}

/// A node's identity.
pub struct Identity {
    /// Who it is.
    pub record: Record,
    /// Certificate of the cluster's authority, as PEM.
    pub ca: String,
    /// Certificate of the node, as PEM.
    pub certificate: String,
    /// Its key, as PEM.
    pub key: String,
    /// The authority's key, as PEM.
    pub ca_key: Option<String>,
}

impl Record {
    /// Of a node that is made now.
    pub fn new(
        cluster: Uuid,
        node: NodeId,
        bootstrap: Option<Bootstrap>,
        settings: Settings,
    ) -> Self {
        Record {
            format: FORMAT,
            cluster,
            node,
            bootstrap,
            history: None,
            settings,
        }
    }

    /// Writes it in place of the one that is there, durably.
    pub fn store(&self, data: &Path) -> Result<()> {
        let path = dir(data).join("node.json");
        let json =
            serde_json::to_string_pretty(self).map_err(|e| Failure::plain(Kind::Failed, e))?;
        files::replace(&path, json.as_bytes()).context(|| format!("write {}", path.display()))
    }
}

fn dir(data: &Path) -> PathBuf {
    data.join("cluster")
}

impl Identity {
    /// Who the node in this data directory is; `None` if it is a cluster of one, or there is none.
    pub fn load(data: &Path) -> Result<Option<Self>> {
        let dir = dir(data);
        if !dir.exists() {
            return Ok(None);
        }
        let read = |name: &str| {
            fs::read_to_string(dir.join(name)).context_hint(
                || format!("read {}", dir.join(name).display()),
                "bring the directory back from a backup, or join again with an empty data directory",
            )
        };
        let path = dir.join("node.json");
        let damaged = |detail: String| {
            Failure::new(
                Kind::Failed,
                format!("{} cannot be used: {detail}", path.display()),
                "bring it back from a backup, or join again with an empty data directory",
            )
        };
        let text = read("node.json")?;
        let record: Record = serde_json::from_str(&text).map_err(|e| damaged(e.to_string()))?;
        if record.format != FORMAT {
            let found = record.format;
            return Err(damaged(format!(
                "it has format {found}, and this version knows {FORMAT}"
            )));
        }
        Ok(Some(Identity {
            record,
            ca: read("ca.pem")?,
            certificate: read("node.pem")?,
            key: read("node.key")?,
            ca_key: match dir.join("ca.key").exists() {
                true => Some(read("ca.key")?),
                false => None,
            },
        }))
    }

    /// Writes it, durably and as a whole.
    pub fn store(&self, data: &Path) -> Result<()> {
        let (dir, new) = (dir(data), data.join("cluster.new"));
        let what = || format!("write {}", new.display());
        remove_unfinished(data)?;
        DirBuilder::new().mode(0o700).create(&new).context(what)?;
        let json = serde_json::to_string_pretty(&self.record)
            .map_err(|e| Failure::plain(Kind::Failed, e))?;
        let mut files = vec![
            ("node.json", json.as_str()),
            ("ca.pem", &self.ca),
            ("node.pem", &self.certificate),
            ("node.key", &self.key),
        ];
        files.extend(self.ca_key.as_deref().map(|key| ("ca.key", key)));
        for (name, text) in files {
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(new.join(name))
                .context(what)?;
            let written = file.write_all(text.as_bytes());
            written.and_then(|()| file.sync_all()).context(what)?;
        }
        let sync = |path: &Path| {
            File::open(path)
                .and_then(|dir| dir.sync_all())
                .context(what)
        };
        sync(&new)?;
        fs::rename(&new, &dir).context(|| format!("make {}", dir.display()))?;
        sync(data)
    }
}

/// Notes, durably, that the node has made its metadata.
pub fn note_begun(data: &Path) -> Result<()> {
    write_note(data, BEGUN)?;
    remove_note(data, REJOINS)
}

/// The node makes its metadata anew at its next start: it gets them from others, who know its devices.
pub fn note_rejoins(data: &Path) -> Result<()> {
    write_note(data, REJOINS)?;
    remove_note(data, BEGUN)
}

/// Whether it is about to do that.
pub fn rejoins(data: &Path) -> bool {
    dir(data).join(REJOINS).exists()
}

fn write_note(data: &Path, name: &str) -> Result<()> {
    let path = dir(data).join(name);
    if path.exists() {
        return Ok(());
    }
    File::create(&path)
        .and_then(|file| file.sync_all())
        .and_then(|()| File::open(dir(data))?.sync_all())
        .context(|| format!("write {}", path.display()))
}

fn remove_note(data: &Path, name: &str) -> Result<()> {
    let path = dir(data).join(name);
    match fs::remove_file(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed
            .and_then(|()| File::open(dir(data))?.sync_all())
            .context(|| format!("remove {}", path.display())),
    }
}

/// Refuses to start a node of several that had metadata and has none any more; called when there are none at
/// `meta`. A voter that forgot what it promised and stored can make leader a node that lacks what was
/// acknowledged, and the first node would make the cluster a second time.
pub fn refuse_forgetful(data: &Path, meta: &Path) -> Result<()> {
    if !dir(data).join(BEGUN).exists() {
        return Ok(());
    }
    let node = Identity::load(data)?.map(|identity| identity.record.node);
    let node = node.map_or_else(|| "NODE".to_owned(), |node| node.to_string());
    Err(Failure::new(
        Kind::NotFound,
        format!(
            "the metadata in {} are gone, and the cluster counts on what this node kept there",
            meta.display()
        ),
        format!(
            "bring the directory back as the daemon left it, or have the others forget this node with \
             `penstock node remove {node}` and join anew with another data directory; if no node has its \
             metadata any more, see `penstock meta restore --help`"
        ),
    ))
}

/// Refuses to make a node where there is one. `meta` is where its metadata would be.
pub fn refuse_node(data: &Path, meta: &Path) -> Result<()> {
    refuse_one_of_several(data)?;
    if meta::MetaNode::exists(meta) {
        return Err(Failure::new(
            Kind::Conflict,
            format!(
                "data directory {} holds a node already, which is a cluster of its own",
                data.display()
            ),
            "choose another directory with --data DIR; volumes come over with `penstock volume export` and \
             `import`. Or make this node the first of the cluster with `penstock init`, and let the others \
             join",
        ));
    }
    Ok(())
}

/// Refuses to make a node where there is one of a cluster of several.
pub fn refuse_one_of_several(data: &Path) -> Result<()> {
    let shown = data.display();
    if let Some(identity) = Identity::load(data)? {
        let Record {
            cluster, settings, ..
        } = identity.record;
        let node = settings.name;
        return Err(Failure::new(
            Kind::Conflict,
            format!("data directory {shown} holds node {node} of cluster {cluster} already"),
            "run it with `penstock serve`, or choose another directory with --data DIR",
        ));
    }
    remove_unfinished(data)
}

/// Refuses a data directory in which no identity could be written.
pub fn rehearse(data: &Path) -> Result<()> {
    let new = data.join("cluster.new");
    let path = new.join("rehearsal");
    let written = DirBuilder::new()
        .mode(0o700)
        .create(&new)
        .and_then(|()| File::create(&path))
        .and_then(|mut file| {
            file.write_all(&[0; REHEARSED_BYTES])?;
            file.sync_all()
        });
    // A directory that was not made is none to remove.
    let removed = remove_unfinished(data);
    written.context_hint(
        || format!("write {}", path.display()),
        "see that there is room and that this user may write there, or choose another directory with --data \
         DIR",
    )?;
    removed
}

/// What a process left that ended before it was done. Nobody was told that it was.
fn remove_unfinished(data: &Path) -> Result<()> {
    let new = data.join("cluster.new");
    match fs::remove_dir_all(&new) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done.context(|| format!("remove {}", new.display())),
    }
}

/// The host's name, as far as it can be a node's.
pub fn host_name() -> String {
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    match Name::parse(&host) {
        Ok(name) => name.to_string(),
        Err(_) => "node".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn identity() -> Identity {
        let peers = Peers {
            listen: Some("10.0.0.1".parse().unwrap()),
            control_port: Some(1),
            ..Peers::default()
        };
        let settings = Settings::new(&peers).unwrap();
        Identity {
            record: Record::new(Uuid::from_u128(1), NodeId(2), None, settings),
            ca: "ca".into(),
            certificate: "certificate".into(),
            key: "key".into(),
            ca_key: Some("ca key".into()),
        }
    }

    #[test]
    fn an_identity_is_read_back_and_only_its_owner_sees_its_keys() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Identity::load(dir.path()).unwrap().is_none());
        let identity = identity();
        identity.store(dir.path()).unwrap();
        let read = Identity::load(dir.path()).unwrap().unwrap();
        assert_eq!(read.record, identity.record);
        assert_eq!((read.key, read.ca_key), (identity.key, identity.ca_key));
        for file in ["node.key", "ca.key"] {
            let path = dir.path().join("cluster").join(file);
            let mode = fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        let refused = refuse_node(dir.path(), &dir.path().join("meta")).unwrap_err();
        assert!(refused.to_string().contains("--data"), "{refused}");
    }

    #[test]
    fn what_an_interrupted_process_left_is_no_identity() {
        let dir = tempfile::tempdir().unwrap();
        let new = dir.path().join("cluster.new");
        fs::create_dir(&new).unwrap();
        fs::write(new.join("node.json"), "{").unwrap();
        assert!(Identity::load(dir.path()).unwrap().is_none());
        let meta = dir.path().join("meta");
        refuse_node(dir.path(), &meta).unwrap();
        assert!(!new.exists());
        // Metadata of a node that is alone.
        fs::create_dir_all(meta.join("db")).unwrap();
        fs::write(meta.join("db/CURRENT"), "").unwrap();
        let refused = refuse_node(dir.path(), &meta).unwrap_err().to_string();
        assert!(
            refused.contains("a cluster of its own") && refused.contains("init"),
            "{refused}"
        );
        identity().store(dir.path()).unwrap();
        assert!(Identity::load(dir.path()).unwrap().is_some());
    }

    #[test]
    fn rehearsal_leaves_no_files_and_names_an_unwritable_directory() {
        let dir = tempfile::tempdir().unwrap();
        rehearse(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // Where nobody writes, not even root.
        let refused = rehearse(Path::new("/proc/self")).unwrap_err().to_string();
        assert!(refused.contains("/proc/self/cluster.new"), "{refused}");
        assert!(refused.contains("--data"), "{refused}");
    }

    #[test]
    fn an_address_that_cannot_be_listened_on_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let mut settings = identity().record.settings;
        settings.listen = "127.0.0.1".parse().unwrap();
        (
            settings.control_port,
            settings.data_port,
            settings.enrol_port,
        ) = (0, 0, 0);
        settings.check_addresses().unwrap();
        settings.enrol_port = port;
        let refused = settings.check_addresses().unwrap_err().to_string();
        assert!(
            refused.contains(&format!("127.0.0.1:{port}: address")),
            "{refused}"
        );
        assert!(refused.contains("--listen"), "{refused}");
        // Without the role nobody joins there.
        settings.roles.remove(&Role::Meta);
        settings.check_addresses().unwrap();
        // Addresses for examples are no machine's.
        settings.listen = "192.0.2.1".parse().unwrap();
        let refused = settings.check_addresses().unwrap_err().to_string();
        assert!(refused.contains("192.0.2.1:0"), "{refused}");
    }

    #[test]
    fn a_node_that_has_lost_its_metadata_does_not_begin_anew() {
        let dir = tempfile::tempdir().unwrap();
        let meta = dir.path().join("meta");
        refuse_forgetful(dir.path(), &meta).unwrap();
        identity().store(dir.path()).unwrap();
        refuse_forgetful(dir.path(), &meta).unwrap();
        note_begun(dir.path()).unwrap();
        note_begun(dir.path()).unwrap();
        let refused = refuse_forgetful(dir.path(), &meta).unwrap_err().to_string();
        assert!(refused.contains("node remove 2"), "{refused}");
    }

    #[test]
    fn what_is_told_now_overrides_what_was_told_then() {
        let identity = identity();
        let peers = Peers {
            listen: Some("10.0.0.9".parse().unwrap()),
            data_port: Some(9),
            ..Peers::default()
        };
        let now = identity.record.settings.with(&peers);
        assert_eq!(now.control().to_string(), "10.0.0.9:1");
        assert_eq!(now.data().to_string(), "10.0.0.9:9");
        assert_eq!(now.enrol().port(), ENROL_PORT);
    }
}
