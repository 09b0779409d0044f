//! What is to say about a domain's virtio-fs device.

use super::{Device, Finding, Level};
use crate::domain::{Domain, QEMU_QUEUE_SIZE, VirtioFilesystem};
use crate::filesystem::QUEUE_SIZE;

/// Entries of a ring that a request takes besides one for each page.
const HEADER_ENTRIES: u16 = 4;
/// Size of a page of the guest, in KiB.
const PAGE_KIB: u16 = 4;

/// An attachment of a filesystem, as far as it matters here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedFilesystem {
    /// Its filesystem.
    pub filesystem: String,
    /// What the guest is to mount it by.
    pub tag: String,
    /// Whether the guest may only read.
    pub is_read_only: bool,
}

/// What is to say about a virtio-fs device's element; `served` is the attachment on its socket.
pub fn filesystem(
    domain: &Domain,
    device: &VirtioFilesystem,
    served: Option<&ServedFilesystem>,
) -> Vec<Finding> {
    let mut findings = vec![attachment(domain, device, served), queue_size(device)];
    findings.extend(served.map(|served| tag(device, served)));
    findings.extend(served.map(|served| access(domain, device, served)));
    findings
        .into_iter()
        .map(|finding| finding.of(Device::Filesystem(device)))
        .collect()
}

fn attachment(
    domain: &Domain,
    device: &VirtioFilesystem,
    served: Option<&ServedFilesystem>,
) -> Finding {
    let (check, socket) = ("attachment", &device.socket);
    if let Some(served) = served {
        let found = format!("{socket} serves filesystem {}", served.filesystem);
        return Finding::new(check, Level::Ok, found);
    }
    // The hook, if it is installed, makes the attachment when the domain starts.
    Finding::new(
        check,
        Level::Warn,
        format!("nothing is attached on {socket}; without the hook the domain does not start"),
    )
    .fix(format!(
        "penstock attach fs {} --socket {socket} --tag {}",
        domain.filesystem_of(device).unwrap_or("NAME"),
        device.tag
    ))
}

fn queue_size(device: &VirtioFilesystem) -> Finding {
    let check = "queue size";
    let size = device.queue_size.unwrap_or(QEMU_QUEUE_SIZE);
    let fix = format!("<driver type='virtiofs' queue='{QUEUE_SIZE}'/>");
    if !size.is_power_of_two() || size > QUEUE_SIZE {
        let found = format!("{size} entries: QEMU takes powers of two up to {QUEUE_SIZE}");
        return Finding::new(check, Level::Fail, found).fix(fix);
    }
    match size == QUEUE_SIZE {
        true => Finding::new(check, Level::Ok, format!("{size} entries")),
        false => {
            let kib = size.saturating_sub(HEADER_ENTRIES) * PAGE_KIB;
            let found =
                format!("{size} entries: the guest sends requests of at most {kib} KiB, not 1 MiB");
            Finding::new(check, Level::Warn, found).fix(fix)
        }
    }
}

/// QEMU shows its guest the tag of the domain's XML, whatever the attachment's is.
fn tag(device: &VirtioFilesystem, served: &ServedFilesystem) -> Finding {
    let (check, tag) = ("tag", &served.tag);
    match device.tag == *tag {
        true => Finding::new(
            check,
            Level::Ok,
            format!("mount -t virtiofs {tag} DIRECTORY"),
        ),
        false => Finding::new(
            check,
            Level::Warn,
            format!(
                "the guest sees '{}', the attachment says '{tag}'",
                device.tag
            ),
        )
        .fix(format!("<target dir='{tag}'/>")),
    }
}

/// Whether the guest may write exactly if the domain's metadata say so.
fn access(domain: &Domain, device: &VirtioFilesystem, served: &ServedFilesystem) -> Finding {
    let check = "access";
    let (name, tag, socket) = (&served.filesystem, &device.tag, &device.socket);
    let asked = domain.asked_for_filesystem(device);
    let wants_read_only = asked.is_some_and(|asked| asked.is_read_only);
    match (wants_read_only, served.is_read_only) {
        (true, true) => Finding::new(check, Level::Ok, "read-only, as the metadata ask for"),
        (false, false) => Finding::new(check, Level::Ok, "the guest may write"),
        (true, false) => Finding::new(
            check,
            Level::Fail,
            format!("the metadata ask for {name} read-only, and the guest may write"),
        )
        .fix(format!(
            "shut the domain down; penstock detach {socket}; penstock attach fs {name} --socket {socket} \
             --tag {tag} --read-only"
        )),
        (false, true) => Finding::new(
            check,
            Level::Warn,
            format!(
                "{name} is served read-only, which the metadata do not say: after the next start the guest \
                 may write"
            ),
        )
        .fix(format!(
            "<penstock:filesystem name='{name}' target='{tag}' readonly='yes'/> in the metadata"
        )),
    }
}
