use super::*;

/// A domain with `parts` beside what every one has.
fn domain(parts: &str, devices: &str) -> Domain {
    try_domain(parts, devices).unwrap()
}

fn try_domain(parts: &str, devices: &str) -> Result<Domain, DomainError> {
    Domain::parse(&format!(
        "<domain type='qemu'><name>d</name><uuid>u</uuid><vcpu current='1'>3</vcpu>{parts}\
         <os><type machine='pc-q35-7.2'>hvm</type></os><devices>{devices}</devices></domain>"
    ))
}

fn disk(target: &str, socket: &str) -> String {
    format!(
        "<disk type='vhostuser' device='disk'><driver name='qemu' queues='2' queue_size='256'/>\
         <source type='unix' path='{socket}'><reconnect enabled='yes' timeout='1'/></source>\
         <target dev='{target}' bus='virtio'/></disk>"
    )
}

#[test]
fn disks_are_found_with_what_they_say() {
    let devices = format!(
        "<disk type='file'><target dev='vda'/></disk>{}",
        disk("vdb", "/s")
    );
    let read = domain("", &devices);
    assert_eq!(read.targets, ["vda", "vdb"]);
    assert_eq!((read.vcpus, read.machine.as_str()), (3, "pc-q35-7.2"));
    let [one] = read.disks.as_slice() else {
        panic!("{read:?}");
    };
    assert_eq!((one.queues, one.queue_size), (Some(2), Some(256)));
    assert_eq!((one.reconnect_s, one.is_packed), (Some(1), false));
    let bare = domain(
        "",
        "<disk type='vhostuser'><source path='/s'><reconnect enabled='no'/></source></disk>",
    );
    assert_eq!(bare.disks[0].reconnect_s, None);
    assert_eq!(bare.queues(bare.disks.first()), 3, "as many as processors");
}

#[test]
fn memory_is_shared_if_every_part_of_it_is() {
    let shared = |parts: &str| domain(parts, "").memory.is_shared;
    let backing = "<memoryBacking><access mode='shared'/></memoryBacking>";
    let numa = |cells: &str| format!("<cpu><numa>{cells}</numa></cpu>");
    let (yes, no, none) = (
        "<cell memAccess='shared'/>",
        "<cell memAccess='private'/>",
        "<cell/>",
    );
    assert!(!shared(""));
    assert!(shared(backing));
    assert!(shared(&numa(&[yes, yes].concat())));
    assert!(!shared(&numa(&[yes, none].concat())));
    assert!(shared(&[backing, &numa(&[yes, none].concat())].concat()));
    assert!(!shared(&[backing, &numa(&[yes, no].concat())].concat()));
    let source = |inner: &str| {
        let parts = format!("<memoryBacking>{inner}</memoryBacking>");
        domain(&parts, "").memory.source
    };
    assert_eq!(source("<hugepages/>"), MemorySource::HugePages);
    assert_eq!(source("<source type='memfd'/>"), MemorySource::Memfd);
    assert_eq!(source("<source type='file'/>"), MemorySource::File);
    assert_eq!(source(""), MemorySource::Anonymous);
}

#[test]
fn sockets_and_metadata_say_which_volumes_are_needed() {
    let metadata = format!(
        "<metadata><p:disks xmlns:p='{NAMESPACE}'><p:disk volume='a'/><disk volume='b' target='vdc' \
         readonly='yes'/></p:disks><other:disk xmlns:other='urn:other' volume='x'/></metadata>"
    );
    let devices = [
        disk("vdb", "/var/run/penstock/web.sock"),
        disk("vdc", "/elsewhere/b"),
        disk("vdd", "/elsewhere/unknown.sock"),
        disk("vde", "/run/penstock/a.sock"),
    ];
    let read = domain(&metadata, &devices.concat());
    let needed = read.needed().unwrap();
    let told: Vec<_> = needed
        .iter()
        .map(|one| (one.volume.as_str(), one.socket.as_str(), one.is_read_only))
        .collect();
    assert_eq!(
        told,
        [
            ("a", "/run/penstock/a.sock", false),
            ("b", "/elsewhere/b", true),
            ("web", "/var/run/penstock/web.sock", false)
        ]
    );
    assert!(needed.iter().all(|one| one.queue_size == 256));
    assert!(needed.iter().all(|one| one.queues == 2));
}

#[test]
fn metadata_are_written_as_they_are_read() {
    let metadata = format!(
        "<metadata><p:disks xmlns:p='{NAMESPACE}'><p:disk volume='a'/><p:disk volume='b' target='vdc' \
         readonly='yes'/></p:disks></metadata>"
    );
    let read = domain(&metadata, "");
    let asked = |volume: &str, target: &str| AskedVolume {
        volume: volume.to_owned(),
        target: Some(target.to_owned()),
        is_read_only: false,
    };
    let all = read.metadata_with(asked("c&'<", "vdd"));
    let element = metadata_xml(&all, &read.asked_filesystems);
    // As virsh sets it: the namespace is at the top alone.
    let set = element.replacen("<disks", &format!("<p:disks xmlns:p='{NAMESPACE}'"), 1);
    let set = set.replace("</disks>", "</p:disks>");
    let again = domain(&format!("<metadata>{set}</metadata>"), "");
    assert_eq!(again.asked, all, "{element}");
    assert_eq!(all.len(), 3);
    assert_eq!(again.metadata_without("b", Some("vdc")).len(), 2);
    assert_eq!(again.metadata_without("a", Some("vda")).len(), 2);
    assert_eq!(again.metadata_without("x", Some("vdx")).len(), 3);
    assert_eq!(
        again.metadata_with(asked("other", "vdc")).len(),
        3,
        "replaced"
    );
}

#[test]
fn metadata_without_sense_are_an_error() {
    let asking = |disk: &str| {
        let parts = format!(
            "<metadata>{}</metadata>",
            disk.replace("NS", &format!("xmlns:p='{NAMESPACE}'"))
        );
        try_domain(&parts, "")
    };
    // A guest that runs has its disks all the same.
    let read = asking("<p:disk NS/>").unwrap();
    let error = read.needed().unwrap_err().to_string();
    assert!(error.contains("names no volume"), "{error}");
    let read = asking("<p:disk NS volume='a' target='vdx'/>").unwrap();
    let error = read.needed().unwrap_err().to_string();
    assert!(error.contains("'a' as vdx"), "{error}");
    let read = asking("<p:disk NS volume='a'/>").unwrap();
    assert_eq!(read.needed().unwrap()[0].socket, "/run/penstock/a.sock");
}

#[test]
fn what_is_no_domain_is_refused() {
    for (text, told) in [
        ("<network/>", "a <network>"),
        ("<domain/>", "no <name>"),
        ("<domain><name>a</name></domain>", "no <uuid>"),
        ("nonsense", "not read"),
    ] {
        let error = Domain::parse(text).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn free_root_ports_are_counted() {
    let port = |index| format!("<controller type='pci' index='{index}' model='pcie-root-port'/>");
    let devices = format!(
        "<controller type='pci' index='0' model='pcie-root'/>{}{}<memballoon>\
         <address type='pci' bus='0x0a'/></memballoon>",
        port(10),
        port(11)
    );
    assert_eq!(domain("", &devices).free_root_ports, Some(1));
    let pc = "<controller type='pci' index='0' model='pci-root'/>";
    assert_eq!(domain("", pc).free_root_ports, None);
}

#[test]
fn a_socket_has_a_name_in_its_own_directory_alone() {
    assert_eq!(name_of("/run/penstock/a.b.sock"), Some("a.b"));
    assert_eq!(name_of("/var/run/penstock/a.sock"), Some("a"));
    for path in [
        "/run/penstock/.sock",
        "/run/penstock/a",
        "/run/penstock/a/b.sock",
        "/run/penstocks/a.sock",
        "/tmp/a.sock",
    ] {
        assert_eq!(name_of(path), None, "{path}");
    }
}

fn virtiofs(tag: &str, source: &str) -> String {
    format!(
        "<filesystem type='mount'><driver type='virtiofs' queue='1024'/><source {source}/>\
         <target dir='{tag}'/></filesystem>"
    )
}

#[test]
fn filesystems_are_found_by_socket_and_metadata() {
    let metadata = format!(
        "<metadata><p:disks xmlns:p='{NAMESPACE}'><p:filesystem name='home' target='users' \
         readonly='yes'/><p:filesystem name='spare'/><p:disk volume='a'/></p:disks></metadata>"
    );
    let devices = [
        virtiofs("tree", "socket='/var/run/penstock/tree.sock'"),
        virtiofs("users", "socket='/srv/home-of-d'"),
        virtiofs("other", "socket='/run/virtiofsd/other.sock'"),
        virtiofs("started-by-libvirt", "dir='/run/penstock/x.sock'"),
        virtiofs("9p", "socket='/run/penstock/9p.sock'").replace("virtiofs", "path"),
    ];
    let read = domain(&metadata, &devices.concat());
    let tags: Vec<_> = read
        .filesystems
        .iter()
        .map(|one| one.tag.as_str())
        .collect();
    assert_eq!(tags, ["tree", "users", "other"]);
    assert_eq!(read.filesystems[0].queue_size, Some(1024));
    let names = read.filesystems.iter().map(|one| read.filesystem_of(one));
    assert_eq!(
        names.collect::<Vec<_>>(),
        [Some("tree"), Some("home"), None]
    );
    let needed = read.needed_filesystems().unwrap();
    let told: Vec<_> = needed
        .iter()
        .map(|one| {
            (
                one.filesystem.as_str(),
                one.socket.as_str(),
                one.tag.as_str(),
                one.is_read_only,
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("home", "/srv/home-of-d", "users", true),
            ("spare", "/run/penstock/spare.sock", "spare", false),
            ("tree", "/var/run/penstock/tree.sock", "tree", false),
        ]
    );
    assert_eq!(read.needed().unwrap().len(), 1, "the volume");
    assert!(read.has_filesystem());
    let foreign = domain("", &virtiofs("other", "socket='/run/virtiofsd/other.sock'"));
    assert!(!foreign.has_filesystem());
}

#[test]
fn metadata_keep_filesystems_when_disks_change() {
    let metadata = format!(
        "<metadata><p:disks xmlns:p='{NAMESPACE}'><p:filesystem name='home' target='a&amp;b' \
         readonly='yes'/></p:disks></metadata>"
    );
    let read = domain(&metadata, "");
    let volumes = read.metadata_with(AskedVolume {
        volume: "c".to_owned(),
        target: None,
        is_read_only: false,
    });
    let set = metadata_xml(&volumes, &read.asked_filesystems);
    let set = set.replacen("<disks", &format!("<p:disks xmlns:p='{NAMESPACE}'"), 1);
    let set = set.replace("</disks>", "</p:disks>");
    let again = domain(&format!("<metadata>{set}</metadata>"), "");
    assert_eq!(again.asked, volumes);
    assert_eq!(again.asked_filesystems, read.asked_filesystems);
    assert_eq!(again.asked_filesystems[0].target.as_deref(), Some("a&b"));
}

#[test]
fn filesystem_metadata_without_sense_are_an_error() {
    let asking = |element: &str| {
        let metadata = format!(
            "<metadata>{}</metadata>",
            element.replace("NS", &format!("xmlns:p='{NAMESPACE}'"))
        );
        let error = domain(&metadata, "").needed_filesystems().unwrap_err();
        error.to_string()
    };
    let error = asking("<p:filesystem NS/>");
    assert!(error.contains("has no name"), "{error}");
    let error = asking("<p:filesystem NS name='home' target='t'/>");
    assert!(error.contains("'home' with the tag 't'"), "{error}");
}
