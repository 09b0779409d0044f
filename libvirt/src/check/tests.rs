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

fn served(queues: u16) -> Service {
    Service::Here(Served {
        volume: "web".into(),
        queues,
        is_read_only: false,
    })
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
        level(&disk(&domain, &domain.disks[0], &served(4)), "reconnect")
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
        let service = offered.map_or(Service::Nothing, served);
        level(&disk(&domain, &domain.disks[0], &service), "queues")
    };
    assert_eq!(of("queues='4'", Some(4)), Level::Ok);
    assert_eq!(of("queues='5'", Some(4)), Level::Fail);
    assert_eq!(of("", Some(2)), Level::Fail, "QEMU would use four");
    assert_eq!(of("", Some(8)), Level::Ok);
    assert_eq!(of("queues='1'", Some(4)), Level::Warn);
    assert_eq!(of("queues='1'", None), Level::Ok, "nobody knows of more");
    let size = |driver: &str| {
        let domain = with_disk(driver, RECONNECT);
        level(
            &disk(&domain, &domain.disks[0], &Service::Nothing),
            "queue size",
        )
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
    let findings = disk(&domain, &domain.disks[0], &Service::Nothing);
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
    let findings = disk(&elsewhere, &elsewhere.disks[0], &Service::Nothing);
    assert_eq!(level(&findings, "attachment"), Level::Fail);
}

#[test]
fn a_closed_socket_fails_with_what_opens_it() {
    let domain = with_disk("", RECONNECT);
    let one = &domain.disks[0];
    let one = Device::Disk(one);
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

#[test]
fn a_volume_that_another_node_has_fails_and_names_the_place() {
    let domain = with_disk("", RECONNECT);
    let elsewhere = Service::Elsewhere("/run/penstock/there.sock".into());
    let findings = disk(&domain, &domain.disks[0], &elsewhere);
    assert_eq!(level(&findings, "attachment"), Level::Fail);
    let text = format!("{findings:?}");
    assert!(text.contains("at /run/penstock/there.sock"), "{text}");
    assert!(text.contains("penstock detach web"), "{text}");
}

fn asking(readonly: &str) -> Domain {
    let metadata = format!(
        "<metadata><p:disk xmlns:p='urn:penstock:libvirt:1' volume='web' target='vdb' {readonly}/></metadata>"
    );
    let disk = "<disk type='vhostuser'><source path='/srv/web'/><target dev='vdb'/></disk>";
    read(&[SHARED, &metadata].concat(), disk)
}

#[test]
fn who_may_write_is_what_the_metadata_say() {
    let of = |domain: &Domain, is_read_only| {
        let service = Service::Here(Served {
            volume: "web".into(),
            queues: 4,
            is_read_only,
        });
        level(&disk(domain, &domain.disks[0], &service), "access")
    };
    let read_only = asking("readonly='yes'");
    assert_eq!(of(&read_only, true), Level::Ok);
    assert_eq!(of(&read_only, false), Level::Fail, "the guest may write");
    assert_eq!(of(&asking(""), false), Level::Ok);
    assert_eq!(of(&asking(""), true), Level::Warn);
    assert_eq!(of(&with_disk("", RECONNECT), true), Level::Warn);
    assert_eq!(of(&with_disk("", RECONNECT), false), Level::Ok);
}

#[test]
fn a_hook_that_is_missing_matters_to_who_relies_on_it() {
    let of = |domain: &Domain, is_installed, is_served| {
        let finding = hook(domain, is_installed, is_served);
        finding.map(|finding| level(&[finding], "hook"))
    };
    let plain = with_disk("", RECONNECT);
    assert_eq!(of(&plain, true, false), Some(Level::Ok));
    assert_eq!(of(&plain, false, false), Some(Level::Warn));
    assert_eq!(of(&plain, false, true), Some(Level::Ok));
    assert_eq!(of(&asking(""), false, true), Some(Level::Fail));
    assert_eq!(of(&asking(""), true, true), Some(Level::Ok));
    assert_eq!(of(&read(SHARED, ""), false, true), None);
}

#[test]
fn huge_pages_that_are_not_free_fail_with_how_many_are_lacking() {
    let wanting = |page: &str| {
        read(
            &format!(
                "<memory unit='MiB'>5</memory><memoryBacking><hugepages>{page}</hugepages><access \
                 mode='shared'/></memoryBacking>"
            ),
            "",
        )
    };
    let host = [2048, 1 << 20].map(|kib| HugePages {
        kib,
        free: 3,
        all: 7,
    });
    let of = |domain: &Domain, is_running, free| {
        let host = host.map(|pages| HugePages { free, ..pages });
        let finding = free_huge_pages(domain, is_running, &host);
        finding.map(|finding| (level(std::slice::from_ref(&finding), "huge pages"), finding))
    };
    let level_of =
        |domain: &Domain, is_running, free| of(domain, is_running, free).map(|one| one.0);
    assert_eq!(
        level_of(&wanting(""), false, 3),
        Some(Level::Ok),
        "of 2 MiB"
    );
    let (lacking, finding) = of(&wanting(""), false, 2).unwrap();
    assert_eq!(lacking, Level::Fail);
    let fix = finding.fix.unwrap();
    assert_eq!(
        fix,
        "echo 8 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
    );
    assert_eq!(
        level_of(&wanting(""), true, 0),
        Some(Level::Ok),
        "it has them"
    );
    let large = "<page size='1' unit='G'/>";
    assert_eq!(level_of(&wanting(large), false, 1), Some(Level::Ok));
    assert_eq!(level_of(&wanting(large), false, 0), Some(Level::Fail));
    let unknown = "<page size='64' unit='KiB'/>";
    assert_eq!(level_of(&wanting(unknown), false, 9), Some(Level::Fail));
    assert_eq!(level_of(&read(SHARED, ""), false, 0), None);
}

#[test]
fn the_kernel_is_asked_for_its_huge_pages() {
    let directory = tempfile::tempdir().unwrap();
    let made = |name: &str, free: &str| {
        let pages = directory.path().join(name);
        std::fs::create_dir(&pages).unwrap();
        std::fs::write(pages.join("free_hugepages"), free).unwrap();
        std::fs::write(pages.join("nr_hugepages"), "12\n").unwrap();
    };
    made("hugepages-1048576kB", "1\n");
    made("hugepages-2048kB", "5\n");
    made("hugepages-oddkB", "5\n");
    made("hugepages-64kB", "many\n");
    let pages = [(2048, 5), (1 << 20, 1)].map(|(kib, free)| HugePages { kib, free, all: 12 });
    assert_eq!(huge_pages(directory.path()), pages);
    assert_eq!(huge_pages(&directory.path().join("nowhere")), []);
}

const VIRTIOFS: &str = "<filesystem type='mount'><driver type='virtiofs' queue='1024'/>\
    <source socket='/run/penstock/home.sock'/><target dir='home'/></filesystem>";

fn served_filesystem() -> ServedFilesystem {
    ServedFilesystem {
        filesystem: "home".into(),
        tag: "home".into(),
        is_read_only: false,
    }
}

#[test]
fn a_filesystem_that_is_served_as_the_domain_says_is_as_it_should_be() {
    let domain = read(SHARED, VIRTIOFS);
    let findings = filesystem(&domain, &domain.filesystems[0], Some(&served_filesystem()));
    for check in ["attachment", "tag", "queue size", "access"] {
        assert_eq!(level(&findings, check), Level::Ok);
    }
    assert!(
        findings
            .iter()
            .all(|one| one.filesystem.as_deref() == Some("home"))
    );
    let all = super::domain(&domain);
    assert!(
        all.iter().all(|finding| finding.check != "disks"),
        "{all:?}"
    );
}

#[test]
fn a_filesystem_without_attachment_is_named_with_the_command() {
    let domain = read(SHARED, VIRTIOFS);
    let findings = filesystem(&domain, &domain.filesystems[0], None);
    assert_eq!(level(&findings, "attachment"), Level::Warn);
    let text = format!("{findings:?}");
    assert!(
        text.contains("penstock attach fs home --socket /run/penstock/home.sock --tag home"),
        "{text}"
    );
}

#[test]
fn a_short_ring_another_tag_and_other_access_are_told() {
    let of = |queue: &str, served: ServedFilesystem| {
        let domain = read(SHARED, &VIRTIOFS.replace(" queue='1024'", queue));
        filesystem(&domain, &domain.filesystems[0], Some(&served))
    };
    let size = |queue: &str| level(&of(queue, served_filesystem()), "queue size");
    assert_eq!(size(""), Level::Warn, "QEMU's default is 128");
    assert_eq!(size(" queue='512'"), Level::Warn);
    assert_eq!(size(" queue='1000'"), Level::Fail);
    assert_eq!(size(" queue='2048'"), Level::Fail);
    let text = format!("{:?}", of("", served_filesystem()));
    assert!(text.contains("requests of at most 496 KiB"), "{text}");
    let other = ServedFilesystem {
        tag: "users".into(),
        is_read_only: true,
        ..served_filesystem()
    };
    let findings = of(" queue='1024'", other);
    assert_eq!(level(&findings, "tag"), Level::Warn);
    assert_eq!(level(&findings, "access"), Level::Warn);
    let metadata = "<metadata><p:filesystem xmlns:p='urn:penstock:libvirt:1' name='home' target='home' \
                    readonly='yes'/></metadata>";
    let domain = read(&[SHARED, metadata].concat(), VIRTIOFS);
    let findings = filesystem(&domain, &domain.filesystems[0], Some(&served_filesystem()));
    assert_eq!(level(&findings, "access"), Level::Fail);
    let finding = hook(&domain, false, true).unwrap();
    assert_eq!(finding.level, Level::Fail, "nobody reads the metadata");
}
