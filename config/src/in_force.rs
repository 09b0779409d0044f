//! What a daemon goes by, and where each value comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use api::size::Size;

use crate::identity::Settings;

use super::keys::{File, FilesystemTable};
use super::{Config, Labels};

/// Which keys the file, the options and the environment set.
#[derive(Debug, Default, Clone)]
pub struct Said {
    /// The file that was read.
    file: Option<PathBuf>,
    in_file: BTreeSet<String>,
    by_option: BTreeSet<String>,
    by_variable: BTreeSet<String>,
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// An option of the command.
    Option,
    /// An environment variable.
    Variable,
    /// This file.
    File(PathBuf),
    /// What `init` or `join` kept.
    Node,
    /// Nobody said anything.
    Default,
}

/// A key in force.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Its whole name.
    pub key: String,
    /// The value as in a configuration file.
    pub value: toml::Value,
    /// Source of the value.
    pub origin: Origin,
}

impl Said {
    /// Of a file, and of options that override it. `by_variable`: the data directory comes from its
    /// environment variable.
    pub fn new(read: Option<&(PathBuf, File)>, options: &File, by_variable: bool) -> Self {
        let mut by_option: BTreeSet<String> = values(options).into_keys().collect();
        let data = by_variable.then(|| by_option.take("data")).flatten();
        Self {
            // Others read it from another directory.
            file: read.map(|(path, _)| std::path::absolute(path).unwrap_or_else(|_| path.clone())),
            in_file: read
                .map(|(_, file)| values(file).into_keys().collect())
                .unwrap_or_default(),
            by_option,
            by_variable: data.into_iter().collect(),
        }
    }

    fn origin(&self, key: &str, is_node: bool) -> Origin {
        match &self.file {
            _ if self.by_option.contains(key) => Origin::Option,
            _ if self.by_variable.contains(key) => Origin::Variable,
            Some(file) if self.in_file.contains(key) => Origin::File(file.clone()),
            _ if is_node => Origin::Node,
            _ => Origin::Default,
        }
    }
}

impl Config {
    /// Every key that has a value, in alphabetical order. `node`: what a node of a cluster goes by.
    pub fn in_force(&self, node: Option<&Settings>) -> Vec<Value> {
        let of_node = node
            .map(|settings| values(&file_of(settings)))
            .unwrap_or_default();
        let own = values(&self.file()).into_iter();
        let own = own.map(|(key, value)| (key, value, false));
        let all = own.chain(of_node.into_iter().map(|(key, value)| (key, value, true)));
        let mut all: Vec<Value> = all
            .map(|(key, value, is_node)| Value {
                origin: self.said.origin(&key, is_node),
                key,
                value,
            })
            .collect();
        all.sort_by(|a, b| a.key.cmp(&b.key));
        all
    }

    /// The file that would configure this, but for what concerns other nodes.
    fn file(&self) -> File {
        let text = |path: &PathBuf| Some(path.clone());
        let user = self.privileges.user.as_ref();
        File {
            data: text(&self.data),
            admin_socket: text(&self.admin_socket),
            metrics_listen: self.metrics_listen.map(|address| address.to_string()),
            store: Some(self.store),
            devices: (!self.devices.is_empty()).then(|| self.devices.clone()),
            device_size: self.device_size,
            device_preallocation: Some(self.device_preallocation),
            threads: Some(self.threads),
            pin: self.pin.clone(),
            poll: Some(self.poll),
            poll_spin_us: Some(self.poll_spin_us),
            socket_mode: Some(format!("{:04o}", self.socket_access.mode)),
            socket_owner: self.socket_access.owner(),
            guest_memory_max_per_attachment: Some(Size(self.guest_memory.per_attachment)),
            guest_memory_max: Some(Size(self.guest_memory.total)),
            pinned_memory_max_per_attachment: Some(Size(self.pinned_memory.per_attachment)),
            pinned_memory_max: Some(Size(self.pinned_memory.total)),
            pool_near_full_percent: Some(self.space_warnings.near_full_percent),
            pool_critical_percent: Some(self.space_warnings.critical_percent),
            filesystem: Some(FilesystemTable {
                cache: Some(Size(self.filesystem_cache_bytes)),
            }),
            user: user.map(|user| user.name.clone()),
            group: user.map(|user| user.gid.to_string()),
            sandbox: Some(self.privileges.sandbox),
            socket_dirs: Some(self.privileges.socket_dirs.clone()),
            peers: (!self.peers.hints.is_empty()).then(|| {
                let hints = self.peers.hints.iter();
                hints.map(ToString::to_string).collect()
            }),
            ..File::default()
        }
    }
}

fn file_of(node: &Settings) -> File {
    File {
        listen: Some(node.listen),
        control_port: Some(node.control_port),
        data_port: Some(node.data_port),
        enrol_port: Some(node.enrol_port),
        wire: Some(node.wire),
        transport: Some(node.transport),
        name: Some(node.name.clone()),
        labels: Some(Labels {
            host: node.labels.host.clone(),
            rack: node.labels.rack.clone(),
        }),
        roles: Some(node.roles.iter().copied().map(Into::into).collect()),
        ..File::default()
    }
}

/// Values that a file sets, by the full names of their keys.
fn values(file: &File) -> BTreeMap<String, toml::Value> {
    let table = toml::Table::try_from(file).unwrap_or_default();
    let mut values = BTreeMap::new();
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => {
                let inner = inner.into_iter();
                values.extend(inner.map(|(name, value)| (format!("{key}.{name}"), value)));
            }
            value => {
                values.insert(key, value);
            }
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::super::{parse, resolve};
    use super::*;

    #[test]
    fn each_value_has_the_origin_that_counts() {
        let file = parse(
            "data = \"/d\"\nthreads = 3\nlabels = { rack = \"r\" }\nfilesystem = { cache = \"64M\" }\n",
            "p.toml",
        )
        .unwrap();
        let options = parse("threads = 4\ndata = \"/e\"\nwire = \"crc\"", "options").unwrap();
        let path = PathBuf::from("/etc/p.toml");
        let said = Said::new(Some(&(path.clone(), file.clone())), &options, true);
        let mut merged = file;
        merged.threads = options.threads;
        merged.data = options.data;
        merged.wire = options.wire;
        let mut config = resolve(merged).unwrap();
        config.said = said;
        let settings = Settings {
            name: "one".to_owned(),
            roles: meta::Role::all(),
            labels: meta::Labels {
                host: None,
                rack: Some("r".to_owned()),
            },
            listen: "10.0.0.1".parse().unwrap(),
            control_port: 1,
            data_port: 2,
            enrol_port: 3,
            wire: super::super::Wire::Crc,
            transport: super::super::Transport::Tcp,
        };
        let shown = config.in_force(Some(&settings));
        let found = |key: &str| {
            let value = shown.iter().find(|value| value.key == key);
            value.map(|value| (value.value.to_string(), value.origin.clone()))
        };
        let expected = |text: &str, origin| Some((text.to_owned(), origin));
        let file = Origin::File(path);
        assert_eq!(found("data"), expected("\"/e\"", Origin::Variable));
        assert_eq!(found("threads"), expected("4", Origin::Option));
        assert_eq!(found("filesystem.cache"), expected("\"64M\"", file.clone()));
        assert_eq!(found("labels.rack"), expected("\"r\"", file));
        assert_eq!(found("wire"), expected("\"crc\"", Origin::Option));
        assert_eq!(found("listen"), expected("\"10.0.0.1\"", Origin::Node));
        assert_eq!(found("store"), expected("\"file\"", Origin::Default));
        assert_eq!(found("labels.host"), None);
        assert_eq!(
            config
                .in_force(None)
                .iter()
                .find(|value| value.key == "wire"),
            None
        );
        // What is shown configures the same.
        let lines = shown
            .iter()
            .map(|value| format!("{} = {}\n", value.key, value.value));
        let again = resolve(parse(&lines.collect::<String>(), "shown").unwrap()).unwrap();
        assert_eq!(again.in_force(None).len(), config.in_force(None).len());
        assert_eq!(again.filesystem_cache_bytes, 64 << 20);
        assert_eq!(again.guest_memory, config.guest_memory);
    }
}
