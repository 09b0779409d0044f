//! Attaching and detaching filesystems.

use api::client::{Client, encode};
use api::failure::{Failure, Result};
use api::types::{AttachmentState, FilesystemAttach, FilesystemAttachment, FilesystemDetached};
use hyper::Method;
use libvirt::filesystem::QUEUE_SIZE;

use crate::args::{AttachFsArgs, DetachArgs};
use crate::commands::{absolute, confirm, print, print_json};

const ATTACHMENTS: &str = "/v1/filesystem-attachments";

/// `penstock attach fs`.
pub async fn attach(args: AttachFsArgs, client: &Client, json: bool) -> Result<()> {
    let request = FilesystemAttach {
        filesystem: args.name,
        socket: absolute("socket", &args.socket)?,
        tag: args.tag,
        queues: args.queues,
        read_only: args.read_only,
    };
    let attachment: FilesystemAttachment = client.call(Method::POST, ATTACHMENTS, &request).await?;
    if json {
        return print_json(&attachment);
    }
    let access = match attachment.read_only {
        true => ", read-only",
        false => "",
    };
    eprintln!(
        "penstock: filesystem {} is served on {}{access}",
        attachment.filesystem, attachment.socket
    );
    eprintln!("penstock: in the guest: {}", mount_command(&attachment));
    eprintln!(
        "penstock: options for QEMU: the first line once per guest, for any number of disks and filesystems, \
         with the size of its -m in place of SIZE; the second line for this attachment"
    );
    print(|out| writeln!(out, "{QEMU_MEMORY}\n{}", qemu_device(&attachment)))
}

/// Ends an attachment of this node.
pub async fn detach(
    attachment: &FilesystemAttachment,
    args: &DetachArgs,
    client: &Client,
    json: bool,
) -> Result<()> {
    let (name, socket) = (&attachment.filesystem, &attachment.socket);
    if args.force {
        return Err(Failure::invalid(
            format!(
                "filesystem '{name}' is attached here, and --force forgets what a node that is down had"
            ),
            "leave --force out, or name the node that is meant with --node",
        ));
    }
    let is_connected = attachment.state == AttachmentState::Connected;
    if is_connected {
        let what = format!(
            "detach {socket}, which a guest is using: it loses filesystem '{name}' until its QEMU is started \
             anew"
        );
        confirm::confirm(&what, args.yes)?;
    }
    let path = format!(
        "{ATTACHMENTS}?target={}&force={is_connected}",
        encode(socket)
    );
    let detached: FilesystemDetached = client.call(Method::DELETE, &path, &()).await?;
    if json {
        return print_json(&detached);
    }
    eprintln!("penstock: detached filesystem {name} from {socket}");
    Ok(())
}

/// Forgets an attachment of a node that is down, as was confirmed. `of_volumes` is why no attachment of a
/// volume was meant.
pub async fn forget(
    target: &str,
    args: &DetachArgs,
    client: &Client,
    json: bool,
    of_volumes: Failure,
) -> Result<()> {
    let node = args.node.iter();
    let node: String = node.map(|name| format!("&node={}", encode(name))).collect();
    let path = format!("{ATTACHMENTS}?target={}&forget=true{node}", encode(target));
    let attached = client.call(Method::DELETE, &path, &()).await;
    let detached: FilesystemDetached = match attached {
        Err(failure) if failure.error.starts_with("nothing is attached") => return Err(of_volumes),
        done => done?,
    };
    if json {
        return print_json(&detached);
    }
    eprintln!(
        "penstock: forgot that filesystem {} was attached at {} on node {}",
        detached.filesystem, detached.socket, detached.node
    );
    Ok(())
}

/// QEMU's options for memory that the daemon can map. A guest has them once: QEMU refuses a second object
/// with the same id.
const QEMU_MEMORY: &str =
    "-object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem";

/// QEMU's options for the device, quoted for a shell. The id differs from that of any other attachment of
/// this node, and the rings are long enough for requests of 1 MiB.
fn qemu_device(attachment: &FilesystemAttachment) -> String {
    let id = qemu_id(&attachment.socket);
    let chardev = format!("socket,id={id},path={}", qemu_value(&attachment.socket));
    let device = format!(
        "vhost-user-fs-pci,chardev={id},tag={},num-request-queues={},queue-size={QUEUE_SIZE}",
        qemu_value(&attachment.tag),
        attachment.queues
    );
    format!(
        "-chardev {} -device {}",
        shell_word(&chardev),
        shell_word(&device)
    )
}

/// Id of a socket's chardev. Different sockets have different ids: a slash becomes a dash, and every other
/// byte that is not a letter, digit or dot its hexadecimal number.
fn qemu_id(socket: &str) -> String {
    let path = socket.strip_prefix('/').unwrap_or(socket);
    let of_byte = |byte: u8| match byte {
        b'/' => "-".to_owned(),
        byte if byte.is_ascii_alphanumeric() || byte == b'.' => char::from(byte).to_string(),
        byte => format!("_{byte:02x}"),
    };
    format!("fs-{}", path.bytes().map(of_byte).collect::<String>())
}

fn mount_command(attachment: &FilesystemAttachment) -> String {
    let options = match attachment.read_only {
        true => "-o ro ",
        false => "",
    };
    format!(
        "mount -t virtiofs {options}{} /mnt",
        shell_word(&attachment.tag)
    )
}

/// A value in an option of QEMU's, where a comma ends it unless there are two.
fn qemu_value(text: &str) -> String {
    text.replace(',', ",,")
}

/// A word as a shell reads it: in quotes if it has anything that means something there.
fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./,=:@%+".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(socket: &str, tag: &str) -> FilesystemAttachment {
        FilesystemAttachment {
            filesystem: "home".to_owned(),
            socket: socket.to_owned(),
            node: "one".to_owned(),
            tag: tag.to_owned(),
            queues: 4,
            read_only: false,
            state: AttachmentState::Listening,
            error: None,
        }
    }

    #[test]
    fn qemu_gets_shared_memory_and_rings_that_are_long_enough() {
        assert_eq!(
            QEMU_MEMORY,
            "-object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem"
        );
        assert_eq!(
            qemu_device(&attachment("/run/penstock/home.sock", "home")),
            "-chardev socket,id=fs-run-penstock-home.sock,path=/run/penstock/home.sock \
             -device vhost-user-fs-pci,chardev=fs-run-penstock-home.sock,tag=home,num-request-queues=4,\
             queue-size=1024"
        );
    }

    #[test]
    fn attachments_of_one_guest_have_different_ids() {
        let sockets = [
            "/run/a/b.sock",
            "/run/a-b.sock",
            "/run/a_b.sock",
            "/run/a_2fb.sock",
            "/run/a b.sock",
            "/run/a,b.sock",
            "/run/ä.sock",
        ];
        let lines = sockets.map(|socket| qemu_device(&attachment(socket, "home")));
        let ids = lines.iter().map(|line| {
            let id = line.split("id=").nth(1).unwrap().split(',').next().unwrap();
            assert!(line.contains(&format!("chardev={id},")), "{line}");
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
            assert!(id.starts_with("fs-") && id.chars().all(is_allowed), "{id}");
            id
        });
        let different: std::collections::BTreeSet<&str> = ids.collect();
        assert_eq!(different.len(), sockets.len(), "{different:?}");
    }

    #[test]
    fn odd_paths_and_tags_survive_shell_and_qemu() {
        let odd = attachment("/srv/a b,c.sock", "it's");
        let options = qemu_device(&odd);
        assert!(
            options.contains("-chardev 'socket,id=fs-srv-a_20b_2cc.sock,path=/srv/a b,,c.sock' "),
            "{options}"
        );
        assert!(options.contains(r"tag=it'\''s,num"), "{options}");
        assert_eq!(mount_command(&odd), r"mount -t virtiofs 'it'\''s' /mnt");
        let read_only = FilesystemAttachment {
            read_only: true,
            ..attachment("/s", "home")
        };
        assert_eq!(
            mount_command(&read_only),
            "mount -t virtiofs -o ro home /mnt"
        );
    }
}
