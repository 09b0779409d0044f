//! Options and the configuration file, joined.

use std::path::PathBuf;

use ::config::{File, Labels};

use super::{NodeArgs, PeerArgs, PrivilegeArgs};

/// Lets options override the file.
pub fn node(mut file: File, args: NodeArgs, data: Option<PathBuf>) -> File {
    file.data = data.or(file.data);
    file.store = args.store.or(file.store);
    if !args.device.is_empty() {
        file.devices = Some(args.device);
    }
    file.device_size = args.device_size.or(file.device_size);
    file.device_preallocation = args.preallocation.or(file.device_preallocation);
    file.threads = args.threads.or(file.threads);
    file.pin = args.pin.or(file.pin);
    file.poll = args.poll.or(file.poll);
    file
}

/// As [`node`], for what concerns other nodes.
pub fn peers(mut file: File, args: PeerArgs) -> File {
    file.listen = args.listen.or(file.listen);
    file.control_port = args.control_port.or(file.control_port);
    file.data_port = args.data_port.or(file.data_port);
    file.enrol_port = args.enrol_port.or(file.enrol_port);
    file.wire = args.wire.or(file.wire);
    file.transport = args.transport.or(file.transport);
    file.name = args.name.or(file.name);
    file.roles = args.roles.or(file.roles);
    let labels = file.labels.unwrap_or_default();
    file.labels = Some(Labels {
        host: args.host.or(labels.host),
        rack: args.rack.or(labels.rack),
    });
    file
}

/// As [`node`], for who the daemon is.
pub fn privileges(mut file: File, args: PrivilegeArgs) -> File {
    file.user = args.user.or(file.user);
    file.group = args.group.or(file.group);
    file.sandbox = args.sandbox.or(file.sandbox);
    file
}
