use super::*;

const SHARED: &str = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";

fn read(parts: &str, devices: &str) -> Domain {
    Domain::parse(&format!(
        "<domain type='kvm'><name>d</name><uuid>u</uuid><vcpu>4</vcpu>{parts}<devices>{devices}</devices>\
         </domain>"
    ))
    .unwrap()
}

fn with_disk(driver: &str, reconnect: &str) -> Domain {
    read(
        SHARED,
        &format!(
            "<disk type='vhostuser'><driver name='qemu' {driver}/><source type='unix' \
             path='/run/penstock/web.sock'>{reconnect}</source><target dev='vdb'/></disk>"
        ),
    )
}

const RECONNECT: &str = "<reconnect enabled='yes' timeout='1'/>";

fn served(queues: u16) -> Served {
    Served {
        volume: "web".into(),
        queues,
    }
}

fn level(findings: &[Finding], check: &str) -> Level {
    let mut found = findings.iter().filter(|finding| finding.check == check);
    let one = found.next().unwrap();
    assert_eq!(found.next(), None);
    let is_fixable = one.fix.is_some();
    assert_eq!(is_fixable, one.level != Level::Ok, "{one:?}");
    one.level
}

#[test]
fn private_memory_fails_and_files_warn() {
    let of = |parts: &str| domain(&read(parts, ""));
    let private = of("");
    assert_eq!(level(&private, "shared memory"), Level::Fail);
    assert!(
        private
            .iter()
            .all(|finding| finding.check != "memory source")
    );
    assert_eq!(level(&of(SHARED), "shared memory"), Level::Ok);
    assert_eq!(level(&of(SHARED), "memory source"), Level::Ok);
    let files = of("<memoryBacking><access mode='shared'/></memoryBacking>");
    assert_eq!(level(&files, "memory source"), Level::Warn);
    assert_eq!(level(&files, "disks"), Level::Warn);
}

#[test]
fn a_machine_needs_pci_and_a_place_for_a_disk() {
    let of = |machine: &str, devices: &str| {
        let parts = format!("<os><type machine='{machine}'>hvm</type></os>");
        let findings = domain(&read(&parts, devices));
        level(&findings, "machine")
    };
    let root = "<controller type='pci' index='0' model='pcie-root'/>";
    let port = "<controller type='pci' index='1' model='pcie-root-port'/>";
    assert_eq!(of("microvm", ""), Level::Fail);
    assert_eq!(of("pc-q35-7.2", root), Level::Warn);
    assert_eq!(of("pc-q35-7.2", &[root, port].concat()), Level::Ok);
    assert_eq!(of("pc-i440fx-7.2", ""), Level::Ok);
}

#[test]
fn a_disk_that_does_not_reconnect_fails() {
    let of = |reconnect: &str| {
        let domain = with_disk("queues='4'", reconnect);
        level(
            &disk(&domain, &domain.disks[0], Some(&served(4))),
            "reconnect",
        )
    };
    assert_eq!(of(RECONNECT), Level::Ok);
    assert_eq!(of(""), Level::Fail);
    assert_eq!(of("<reconnect enabled='no'/>"), Level::Fail);
    assert_eq!(of("<reconnect enabled='yes' timeout='0'/>"), Level::Fail);
    assert_eq!(of("<reconnect enabled='yes' timeout='60'/>"), Level::Warn);
}

#[test]
fn queues_fit_the_attachment_and_the_processors() {
    let of = |driver: &str, offered: Option<u16>| {
        let domain = with_disk(driver, RECONNECT);
        let served = offered.map(served);
        level(&disk(&domain, &domain.disks[0], served.as_ref()), "queues")
    };
    assert_eq!(of("queues='4'", Some(4)), Level::Ok);
    assert_eq!(of("queues='5'", Some(4)), Level::Fail);
    assert_eq!(of("", Some(2)), Level::Fail, "QEMU would use four");
    assert_eq!(of("", Some(8)), Level::Ok);
    assert_eq!(of("queues='1'", Some(4)), Level::Warn);
    assert_eq!(of("queues='1'", None), Level::Ok, "nobody knows of more");
    let size = |driver: &str| {
        let domain = with_disk(driver, RECONNECT);
        level(&disk(&domain, &domain.disks[0], None), "queue size")
    };
    assert_eq!(size("queue_size='1024'"), Level::Ok);
    assert_eq!(size("queue_size='512'"), Level::Ok);
    assert_eq!(size(""), Level::Ok);
    assert_eq!(size("queue_size='100'"), Level::Fail);
    assert_eq!(size("queue_size='2048'"), Level::Fail);
}

#[test]
fn a_socket_without_attachment_is_named_with_the_command() {
    let domain = with_disk("queues='2'", RECONNECT);
    let findings = disk(&domain, &domain.disks[0], None);
    assert_eq!(level(&findings, "attachment"), Level::Warn);
    let text = format!("{findings:?}");
    assert!(
        text.contains("penstock attach volume web --socket /run/penstock/web.sock --queues 2"),
        "{text}"
    );
    let elsewhere = read(
        SHARED,
        "<disk type='vhostuser'><source path='/srv/x'/></disk>",
    );
    let findings = disk(&elsewhere, &elsewhere.disks[0], None);
    assert_eq!(level(&findings, "attachment"), Level::Fail);
}

#[test]
fn a_closed_socket_fails_with_what_opens_it() {
    let domain = with_disk("", RECONNECT);
    let one = &domain.disks[0];
    let of = |denied: Result<(), Denied>| [socket(one, &denied)];
    assert_eq!(level(&of(Ok(())), "socket"), Level::Ok);
    let directory = Denied::Directory {
        path: "/run/penstock".into(),
        user: "libvirt-qemu".into(),
        mode: 0o700,
        owner: "root:root".into(),
    };
    assert_eq!(level(&of(Err(directory)), "socket"), Level::Fail);
    let closed = Denied::Socket {
        path: "/run/penstock/web.sock".into(),
        user: "libvirt-qemu".into(),
        group: "libvirt-qemu".into(),
        mode: 0o600,
        owner: "root:root".into(),
    };
    let [finding] = of(Err(closed));
    assert!(
        finding
            .fix
            .as_ref()
            .unwrap()
            .contains("socket_owner = \":libvirt-qemu\""),
        "{finding:?}"
    );
    let [finding] = [confinement(one, Some(false))];
    assert_eq!(finding.level, Level::Fail);
    assert!(finding.fix.unwrap().contains("/run/penstock/*.sock rw,"));
    assert_eq!(confinement(one, Some(true)).level, Level::Ok);
    assert_eq!(confinement(one, None).level, Level::Ok);
}
