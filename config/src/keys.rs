//! Every key of the configuration: how it is parsed and what it means, said once. The reference (the page
//! `docs/CONFIG.md` and the manual page penstock.toml(5)) is generated from this.

use std::net::IpAddr;
use std::path::PathBuf;

use api::size::Size;
use serde::{Deserialize, Serialize};

use super::{DeviceSpec, Poll, Preallocation, RoleName, Sandbox, StoreKind, Transport, Wire};

/// Keys that belong together.
#[derive(Debug)]
pub struct Section {
    /// Heading; empty in a table within the file.
    pub title: &'static str,
    /// What is said of all of them.
    pub intro: &'static str,
    pub keys: &'static [Key],
}

/// A key.
#[derive(Debug)]
pub struct Key {
    pub name: &'static str,
    /// What it may be.
    pub value: &'static str,
    /// The option and the variable that override it; empty if there is none.
    pub overridden_by: &'static str,
    /// Lines of Markdown.
    pub text: &'static [&'static str],
}

/// Declares a table of the configuration: what serde parses, and what [`Section`]s say of it.
macro_rules! table {
    ($(#[$meta:meta])* pub struct $table:ident {
        $($title:literal $(intro $intro:literal)? {
            $($(#[doc = $text:literal])+ $key:ident: $type:ty, $value:literal $(, $by:literal)?;)+
        })+
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $table { $($($(#[doc = $text])+ pub $key: $type,)+)+ }

        impl $table {
            /// What its keys mean.
            pub const SECTIONS: &'static [Section] = &[$(Section {
                title: $title,
                intro: concat!($($intro)?),
                keys: &[$(Key {
                    name: stringify!($key),
                    value: $value,
                    overridden_by: concat!($($by)?),
                    text: &[$($text),+],
                }),+],
            }),+];
        }
    };
}

/// Tables within the file, by the key that has them.
pub const TABLES: [(&str, &[Section]); 3] = [
    ("devices", SizedDevice::SECTIONS),
    ("filesystem", FilesystemTable::SECTIONS),
    ("labels", Labels::SECTIONS),
];

table! {
    /// The file's content: every key optional, an unknown one an error.
    #[derive(Default)]
    pub struct File {
        "Storage" {
            /// The data directory: metadata, keys, the admin socket, and the default device. Default:
            /// `/var/lib/penstock` for root, `$XDG_DATA_HOME/penstock` (or `~/.local/share/penstock`) for
            /// other users.
            data: Option<PathBuf>, "path", "option `--data`, variable `PENSTOCK_DATA`";
            /// What the node stores into. `file`: the chunk store on devices. `null`: drops every write, and
            /// reads give garbage; for benchmarks of the guest's side. Default: `file`.
            store: Option<StoreKind>, "`file` or `null`", "option `--store`";
            /// The block devices and files that the node owns. An entry is a path, or a table
            /// `{ path = …, size = … }`. Only a node with the role `storage` has devices. Default: one file,
            /// `devices/0.img` in the data directory.
            devices: Option<Vec<DeviceSpec>>, "list",
                "option `--device PATH[:SIZE]`, which replaces the list and may be repeated";
            /// The size of the default device file when it is created. Default: half of the free space of
            /// the filesystem.
            device_size: Option<Size>, "size", "option `--device-size`";
            /// How a device file that is created gets its space. `off`: as it is written; guests' writes
            /// fail when the filesystem is full. `falloc`: reserved at once. `full`: reserved and written
            /// with zeroes; slow once, and then every write is as fast as it ever gets. Default: `falloc`.
            device_preallocation: Option<Preallocation>, "`off`, `falloc` or `full`",
                "option `--preallocation`";
        }
        "Data threads" {
            /// Data threads: they serve the guests' queues. Default: 2, or 1 on a machine with one CPU.
            threads: Option<usize>, "number, 1 to 256", "option `--threads`";
            /// The data threads are pinned to these CPUs in turn. Default: not pinned.
            pin: Option<Vec<usize>>, "list of CPU numbers", "option `--pin`";
            /// When a data thread spins instead of sleeping. `adaptive`: for a bounded time after work.
            /// `always`: each data thread takes a whole core. `never`: lowest CPU use, highest latency.
            /// Default: `adaptive`.
            poll: Option<Poll>, "`adaptive`, `always` or `never`", "option `--poll`";
            /// How long an adaptive thread spins before it sleeps, in microseconds. Default: 50.
            poll_spin_us: Option<u32>, "number, at most 500";
        }
        "Sockets and addresses" {
            /// The socket of the admin API. Commands find it through a link in the data directory. Default:
            /// `penstock.sock` in the data directory.
            admin_socket: Option<PathBuf>, "path";
            /// Prometheus reads metrics there over plain HTTP ([METRICS.md](METRICS.md)). Default: off;
            /// metrics are on the admin socket only.
            metrics_listen: Option<String>,
                "address with port, like `\"10.0.0.1:9180\"` or `\"[::]:9180\"`";
            /// The mode of attachment sockets. Default: `"0600"`.
            socket_mode: Option<String>, "octal text, like `\"0660\"`";
            /// The owner of attachment sockets. Default: the daemon's user.
            socket_owner: Option<String>,
                "`\"USER\"`, `\"USER:GROUP\"` or `\":GROUP\"`, by name or number";
            /// The most guest memory that one attachment has mapped. A memory table beyond it is refused.
            /// Default: `4T`.
            guest_memory_max_per_attachment: Option<Size>, "size";
            /// The most that all attachments have mapped. Each attachment maps the whole memory of its
            /// guest: 28 disks of a guest with 1 TiB count 28 TiB. Default: `16T`.
            guest_memory_max: Option<Size>, "size";
            /// The most guest memory that is pinned for RDMA for one attachment. What lies beyond is copied.
            /// Default: `4T`.
            pinned_memory_max_per_attachment: Option<Size>, "size";
            /// The most that is pinned for all attachments, counted likewise. Default: `16T`.
            pinned_memory_max: Option<Size>, "size";
        }
        "Warnings" {
            /// `penstock health` tells of a pool among what goes on, and an event is kept, once this much of
            /// its fullest device is in use. Default: 80.
            pool_near_full_percent: Option<u8>, "number, 1 to 100";
            /// The same among what is wrong. Default: 90.
            pool_critical_percent: Option<u8>, "number, from `pool_near_full_percent` to 100";
        }
        "Filesystems" {
            /// What serves filesystems to guests.
            filesystem: Option<FilesystemTable>, "table `{ cache = … }`";
        }
        "Privileges" {
            /// The user that the daemon becomes after it has opened its block devices. Default: it stays who
            /// it is.
            user: Option<String>, "name", "option `--user`";
            /// Its group. Default: the user's.
            group: Option<String>, "name", "option `--group`";
            /// Whether Landlock limits paths and seccomp system calls. `on` does not start if that fails,
            /// `best-effort` goes on with what this kernel can do. Default: `on` with `user`, else `off`.
            sandbox: Option<Sandbox>, "`on`, `best-effort` or `off`", "option `--sandbox`";
            /// Further directories in which a sandboxed daemon makes attachment sockets. Default:
            /// `/run/penstock`.
            socket_dirs: Option<Vec<PathBuf>>, "list of paths";
        }
        "Nodes of a cluster"
            intro "These keys are for nodes made by `penstock init` or `penstock join`. Both keep what they \
                   were told in the data directory. `serve` goes by that, unless the file or an option says \
                   otherwise. A node of its own has none of them."
        {
            /// Other nodes reach this node there. `init` and `join` need it; `0.0.0.0` is refused.
            listen: Option<IpAddr>, "IP address", "option `--listen`";
            /// For metadata. Default: 7470.
            control_port: Option<u16>, "port", "option `--control-port`";
            /// For data. Default: 7471.
            data_port: Option<u16>, "port", "option `--data-port`";
            /// Nodes join here; used by nodes with the role `meta`. Default: 7472.
            enrol_port: Option<u16>, "port", "option `--enrol-port`";
            /// Addresses at which a starting node also looks for other nodes. Needed if the addresses of all
            /// nodes changed: one address that leads to another node is enough. At most 16. Without a port,
            /// this node's own control port is used. Default: none.
            peers: Option<Vec<String>>, "list of IP addresses, with port or without",
                "option `--peer`, which replaces the list and may be repeated";
            /// How data travel between nodes. `tls`: encrypted. `crc`: authenticated at the beginning, then
            /// plain with checksums; for a network on which nobody else is. Default: `tls`.
            wire: Option<Wire>, "`tls` or `crc`", "option `--wire`";
            /// By which way data go between nodes. `tcp`: TCP. `auto`: RDMA where this node and the peer
            /// can, else TCP. `rdma`: the same, but the node does not start if it cannot use RDMA. RDMA
            /// needs `wire = "crc"` on all nodes ([RDMA.md](RDMA.md)). Default: `tcp`.
            transport: Option<Transport>, "`tcp`, `auto` or `rdma`", "option `--transport`";
            /// The name of the node. Default: the host's name.
            name: Option<String>, "text", "option `--name`";
            /// Where the node stands. Pools keep copies apart by these labels.
            labels: Option<Labels>, "table `{ host = …, rack = … }`";
            /// What the node does. `meta`: keeps the cluster's metadata. `storage`: owns devices. `host`:
            /// serves guests. `nfs`: serves clients outside of guests. Default: all; for a node that
            /// joins, those that its token grants.
            roles: Option<Vec<RoleName>>, "list of `meta`, `storage`, `host`, `nfs`",
                "option `--roles`";
        }
    }
}

table! {
    /// A device with the size its file is created with.
    #[derive(PartialEq, Eq)]
    pub struct SizedDevice {
        "" {
            /// A block device, or a file.
            path: PathBuf, "path";
            /// The size of the file if it has to be created. At least 4M.
            size: Size, "size";
        }
    }
}

table! {
    /// What serves filesystems to guests.
    #[derive(Default)]
    pub struct FilesystemTable {
        "" {
            /// Memory for file data that this node caches, of all filesystems together; `0` for none.
            /// Default: `256M`, or an eighth of the machine's memory if that is less.
            cache: Option<Size>, "size";
        }
    }
}

table! {
    /// Where a node stands.
    #[derive(Default, PartialEq, Eq)]
    pub struct Labels {
        "" {
            /// The machine, if it carries several nodes.
            host: Option<String>, "text", "option `--host`";
            /// The rack or room.
            rack: Option<String>, "text", "option `--rack`";
        }
    }
}
