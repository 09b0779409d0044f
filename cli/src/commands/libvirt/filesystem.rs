//! Filesystems of domains: the element that `fs-xml` prints, and attachments for the hook.

use api::client::Client;
use api::failure::{Failure, Kind, Result};
use api::types::{
    AttachmentState, FilesystemAttach, FilesystemAttachment, FilesystemDetached,
    request_queues_default,
};
use hyper::Method;
use libvirt::domain::{NeededFilesystem, socket_of};
use libvirt::filesystem::FilesystemElement;

use crate::args::{FsXmlArgs, Global};
use crate::commands::{absolute, locate, print, refuse_json};

use super::{attachments, check_socket};

const ATTACHMENTS: &str = "/v1/filesystem-attachments";

/// `penstock libvirt fs-xml`.
pub async fn xml(args: &FsXmlArgs, global: &Global) -> Result<()> {
    refuse_json(global.json, "libvirt's XML")?;
    let client = locate::client(global).await?;
    let socket = args.socket.as_deref();
    let socket = socket.map(|path| absolute("socket", path)).transpose()?;
    let all = list(&client).await?;
    let attachment = chosen(&all, &args.name, socket.as_deref())?;
    check_socket(&attachment.socket)?;
    let text = xml_of(attachment);
    print(|out| write!(out, "{text}"))
}

/// The attachment of a filesystem that is meant: its only one, or the one on the socket.
fn chosen<'a>(
    all: &'a [FilesystemAttachment],
    name: &str,
    socket: Option<&str>,
) -> Result<&'a FilesystemAttachment> {
    let is_meant = |one: &&FilesystemAttachment| {
        one.filesystem == name && socket.is_none_or(|socket| one.socket == socket)
    };
    let found: Vec<_> = all.iter().filter(is_meant).collect();
    match found.as_slice() {
        [one] => Ok(one),
        [] => {
            let place = socket.map(|socket| format!(" on {socket}"));
            let socket = socket.map_or_else(|| socket_of(name), str::to_owned);
            Err(Failure::new(
                Kind::NotFound,
                format!(
                    "filesystem '{name}' is not attached{}",
                    place.unwrap_or_default()
                ),
                format!("run `penstock attach fs {name} --socket {socket} --tag {name}` first"),
            ))
        }
        several => {
            let sockets: Vec<_> = several.iter().map(|one| one.socket.as_str()).collect();
            Err(Failure::invalid(
                format!(
                    "filesystem '{name}' is attached on {} sockets",
                    several.len()
                ),
                format!("name one with --socket: {}", sockets.join(", ")),
            ))
        }
    }
}

/// The element, and in a comment what else the domain needs.
fn xml_of(attachment: &FilesystemAttachment) -> String {
    let element = FilesystemElement {
        socket: attachment.socket.clone(),
        tag: attachment.tag.clone(),
    };
    // A comment must not contain two hyphens in a row; the filesystem's name could.
    let name = attachment.filesystem.replace("--", "- -");
    let access = match attachment.read_only {
        true => ", read-only: mount it with -o ro",
        false => "",
    };
    format!(
        "<!-- Penstock filesystem {name}{access}. The domain needs memory that the daemon can map:\n     {} \
         -->\n{}",
        libvirt::disk::SHARED_MEMORY,
        element.to_xml()
    )
}

/// All attachments of filesystems on this node.
pub async fn list(client: &Client) -> Result<Vec<FilesystemAttachment>> {
    client.get(ATTACHMENTS).await
}

/// Makes an attachment for a domain, or takes the one that waits on its socket. True if it was made. One with
/// another tag is made anew.
pub async fn ready(client: &Client, needed: &NeededFilesystem) -> Result<bool> {
    let all = list(client).await?;
    if let Some(found) = all.iter().find(|one| one.socket == needed.socket) {
        if let Some(failure) = unfit(found, needed) {
            return Err(failure);
        }
        if found.tag == needed.tag {
            return Ok(false);
        }
        end(client, &found.socket).await?;
    }
    let request = FilesystemAttach {
        filesystem: needed.filesystem.clone(),
        socket: needed.socket.clone(),
        tag: needed.tag.clone(),
        queues: request_queues_default(),
        read_only: needed.is_read_only,
    };
    let made = client.call::<_, FilesystemAttachment>(Method::POST, ATTACHMENTS, &request);
    made.await.map(|_| true)
}

/// Why a domain cannot use an attachment that is there.
fn unfit(found: &FilesystemAttachment, needed: &NeededFilesystem) -> Option<Failure> {
    let (socket, name) = (&found.socket, &found.filesystem);
    let detach = || format!("detach it first: penstock detach {socket}");
    if *name != needed.filesystem {
        let wanted = &needed.filesystem;
        let error = format!("{socket} serves filesystem '{name}', not '{wanted}'");
        return Some(Failure::new(Kind::Conflict, error, detach()));
    }
    if found.state == AttachmentState::Connected {
        return Some(Failure::new(
            Kind::Conflict,
            format!("a guest uses filesystem '{name}' on {socket}"),
            "shut that guest down first, or give this domain a socket of its own",
        ));
    }
    (found.read_only != needed.is_read_only).then(|| {
        let (is, wanted) = match found.read_only {
            true => ("read-only", "for writing"),
            false => ("for writing", "read-only"),
        };
        let error =
            format!("filesystem '{name}' is attached {is} on {socket}, and is needed {wanted}");
        Failure::new(Kind::Conflict, error, detach())
    })
}

/// Ends an attachment that no guest uses; waits a moment for one that is about to go.
pub async fn end(client: &Client, socket: &str) -> Result<FilesystemDetached> {
    attachments::end_at(client, ATTACHMENTS, socket).await
}

#[cfg(test)]
mod tests {
    use libvirt::domain::Domain;

    use super::*;

    fn attachment(name: &str, socket: &str) -> FilesystemAttachment {
        FilesystemAttachment {
            filesystem: name.to_owned(),
            socket: socket.to_owned(),
            node: "one".to_owned(),
            tag: "tree".to_owned(),
            queues: 4,
            read_only: false,
            state: AttachmentState::Listening,
            error: None,
        }
    }

    #[test]
    fn the_printed_element_is_one_that_the_hook_knows() {
        let xml = xml_of(&attachment("home", "/run/penstock/home.sock"));
        assert!(xml.starts_with("<!-- Penstock filesystem home. "), "{xml}");
        assert!(
            xml.contains("<memoryBacking><source type='memfd'/>"),
            "{xml}"
        );
        let domain =
            format!("<domain><name>d</name><uuid>u</uuid><devices>{xml}</devices></domain>");
        let needed = Domain::parse(&domain)
            .unwrap()
            .needed_filesystems()
            .unwrap();
        let expected = NeededFilesystem {
            filesystem: "home".to_owned(),
            socket: "/run/penstock/home.sock".to_owned(),
            tag: "tree".to_owned(),
            is_read_only: false,
        };
        assert_eq!(needed, [expected]);
    }

    #[test]
    fn the_element_is_of_the_only_attachment_or_of_the_one_on_the_socket() {
        let all = [
            attachment("home", "/run/a.sock"),
            attachment("tree", "/run/b.sock"),
            attachment("tree", "/run/c.sock"),
        ];
        let socket = |name: &str, socket| chosen(&all, name, socket).map(|one| one.socket.as_str());
        assert_eq!(socket("home", None), Ok("/run/a.sock"));
        assert_eq!(socket("tree", Some("/run/c.sock")), Ok("/run/c.sock"));
        let several = socket("tree", None).unwrap_err();
        assert!(several.hint.unwrap().contains("/run/b.sock, /run/c.sock"));
        let none = socket("nope", None).unwrap_err();
        assert_eq!(
            none.hint.as_deref(),
            Some("run `penstock attach fs nope --socket /run/penstock/nope.sock --tag nope` first")
        );
        let elsewhere = socket("home", Some("/run/c.sock")).unwrap_err();
        assert!(
            elsewhere.error.contains("not attached on /run/c.sock"),
            "{elsewhere}"
        );
    }

    #[test]
    fn an_attachment_that_does_not_fit_is_left_alone() {
        let needed = NeededFilesystem {
            filesystem: "home".to_owned(),
            socket: "/run/a.sock".to_owned(),
            tag: "tree".to_owned(),
            is_read_only: false,
        };
        let found = attachment("home", "/run/a.sock");
        assert_eq!(unfit(&found, &needed), None);
        let told = |found: FilesystemAttachment| unfit(&found, &needed).unwrap().error;
        let other = attachment("other", "/run/a.sock");
        assert!(told(other).contains("serves filesystem 'other', not 'home'"));
        let used = FilesystemAttachment {
            state: AttachmentState::Connected,
            ..found.clone()
        };
        assert!(told(used).contains("a guest uses filesystem 'home'"));
        let read_only = FilesystemAttachment {
            read_only: true,
            ..found
        };
        assert!(told(read_only).contains("attached read-only on /run/a.sock"));
    }
}
