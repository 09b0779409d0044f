//! `penstock libvirt attach` and `detach`.

use std::path::Path;
use std::time::{Duration, Instant};

use api::client::Client;
use api::failure::{Failure, Kind, Result};
use api::types::queues_default;
use libvirt::access::QemuUser;
use libvirt::apparmor;
use libvirt::check::{self, Level};
use libvirt::claim::ClaimKind;
use libvirt::disk::{DiskElement, QUEUE_SIZE_MAX, free_target};
use libvirt::domain::{AskedVolume, Domain, NeededVolume, VhostUserDisk, name_of, socket_of};
use libvirt::virsh::{HOTPLUG_RECONNECTS, Scope, Virsh};
use serde::Serialize;

use crate::args::{Global, LibvirtAttachArgs, LibvirtDetachArgs};
use crate::commands::{absolute, locate, print_json};

use super::attachments::{self, Ready, Source};
use super::{check_socket, claims, scope, virsh_failure};

/// How long a guest may take to let a disk go. Its kernel answers within a second, unless it has not booted
/// far enough or has stopped.
const UNPLUG_MAX: Duration = Duration::from_secs(30);
/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// What was done, for programs.
#[derive(Serialize)]
struct Done<'a> {
    domain: &'a str,
    volume: &'a str,
    target: &'a str,
    socket: &'a str,
    live: bool,
    config: bool,
}

/// `penstock libvirt attach`.
pub async fn attach(args: LibvirtAttachArgs, global: &Global) -> Result<()> {
    let virsh = Virsh::new(args.connect.connect.clone());
    let scope = scope(&virsh, &args.domain, args.scope)?;
    let domains = Domains::read(&virsh, &args.domain, scope)?;
    let target = domains.target(&args)?;
    let client = locate::client(global).await?;
    let needed = needed(&args, &domains)?;
    let claim = claims::of(
        domains.one(),
        ClaimKind::Volume,
        &needed.volume,
        &needed.socket,
    );
    // The hook detaches at a domain's end what the domain has claimed.
    let is_claimed = scope.is_live && claims::take(&client, &claim).await?;
    let element = match plug(&virsh, &client, &args, &domains, &needed, &target, scope).await {
        Ok(element) => element,
        Err(failure) => {
            if is_claimed {
                claims::give_up(&claim);
            }
            return Err(failure);
        }
    };
    let done = Done {
        domain: &domains.one().name,
        volume: &args.volume,
        target: &target,
        socket: &element.socket,
        live: scope.is_live,
        config: scope.is_config,
    };
    done.tell(global.json, "is now disk", ", until it ends")?;
    if scope.is_live {
        warn_of_restart(&virsh, &element.target);
    }
    Ok(())
}

/// What the domain's metadata must say of a disk, for the hook to make the same attachment at the next start:
/// nothing if the disk's socket says it all.
fn asked(needed: &NeededVolume, target: &str) -> Option<AskedVolume> {
    let is_plain = !needed.is_read_only && name_of(&needed.socket) == Some(&needed.volume);
    (!is_plain).then(|| AskedVolume {
        volume: needed.volume.clone(),
        target: Some(target.to_owned()),
        is_read_only: needed.is_read_only,
    })
}

/// The metadata of the domains that are changed.
struct Metadata<'a> {
    virsh: &'a Virsh,
    domains: &'a Domains,
}

impl Metadata<'_> {
    fn set(&self, change: impl Fn(&Domain) -> Vec<AskedVolume>) -> Result<()> {
        let live = self.domains.live.iter().map(|(domain, _)| (domain, LIVE));
        let config = self.domains.config.iter();
        for (domain, scope) in live.chain(config.map(|(domain, _)| (domain, CONFIG))) {
            let asked = change(domain);
            if asked != domain.asked {
                let filesystems = &domain.asked_filesystems;
                let set = self
                    .virsh
                    .set_asked(&domain.name, &asked, filesystems, scope);
                set.map_err(virsh_failure)?;
            }
        }
        Ok(())
    }

    fn ask_for(&self, asked: Option<&AskedVolume>) -> Result<()> {
        match asked {
            Some(asked) => self.set(|domain| domain.metadata_with(asked.clone())),
            None => Ok(()),
        }
    }

    /// Takes back what [`ask_for`](Self::ask_for) has done.
    fn restore(&self, asked: Option<&AskedVolume>) {
        if asked.is_none() {
            return;
        }
        for (domain, scope) in [(&self.domains.live, LIVE), (&self.domains.config, CONFIG)] {
            let Some((domain, _)) = domain else { continue };
            let (asked, filesystems) = (&domain.asked, &domain.asked_filesystems);
            let set = self
                .virsh
                .set_asked(&domain.name, asked, filesystems, scope);
            if let Err(error) = set {
                eprintln!(
                    "penstock: the metadata of domain {} keep what they ask for: {error}",
                    domain.name
                );
            }
        }
    }
}

/// Warns of a libvirt whose hotplugged disks do not outlive the daemon.
fn warn_of_restart(virsh: &Virsh, target: &str) {
    // The disk is there, whatever virsh says now.
    let version = virsh.version().unwrap_or_default();
    if let Some((major, minor)) = version.filter(|version| *version < HOTPLUG_RECONNECTS) {
        eprintln!(
            "penstock: warning: libvirt {major}.{minor} does not let a disk that is plugged into a running \
             guest connect again: after a restart of the daemon {target} stands still until the domain \
             has been \
             shut down and started"
        );
    }
}

/// Makes the attachment and gives the domain its disk: both or neither.
async fn plug(
    virsh: &Virsh,
    client: &Client,
    args: &LibvirtAttachArgs,
    domains: &Domains,
    needed: &NeededVolume,
    target: &str,
    scope: Scope,
) -> Result<DiskElement> {
    let Ready { attachment, is_new } = attachments::ready(client, needed, Source::Fresh).await?;
    let element = DiskElement {
        socket: attachment.socket,
        target: target.to_owned(),
        queues: needed.queues,
        queue_size: needed.queue_size,
        boot_order: None,
        is_packed: args.packed,
    };
    // QEMU tries for ever to connect, and a running guest stands still meanwhile: whether it may is found out
    // before.
    let (metadata, asked) = (Metadata { virsh, domains }, asked(needed, target));
    let attached = may_connect(virsh, domains.one(), &element.socket).and_then(|()| {
        let attached = metadata.ask_for(asked.as_ref()).and_then(|()| {
            let attached = virsh.attach_device(&args.domain, &element.to_xml(), scope);
            attached.map_err(virsh_failure)
        });
        if attached.is_err() {
            metadata.restore(asked.as_ref());
        }
        attached
    });
    match attached {
        Ok(()) => Ok(element),
        Err(failure) => Err(undone(client, &element.socket, is_new, failure).await),
    }
}

impl Done<'_> {
    /// Says it; `for_now` is what it means if only the running guest was changed.
    fn tell(&self, json: bool, verb: &str, for_now: &str) -> Result<()> {
        if json {
            return print_json(self);
        }
        let when = match (self.live, self.config) {
            (true, true) => "",
            (true, false) => for_now,
            (false, _) => ", from its next start on",
        };
        eprintln!(
            "penstock: volume {} {verb} {} of domain {}{when}",
            self.volume, self.target, self.domain
        );
        Ok(())
    }
}

/// A domain as it runs, as it starts next, or both: what is to be changed.
struct Domains {
    live: Option<(Domain, String)>,
    config: Option<(Domain, String)>,
}

impl Domains {
    fn read(virsh: &Virsh, name: &str, scope: Scope) -> Result<Self> {
        let read = |wanted: bool, inactive| {
            let read = wanted.then(|| virsh.domain(name, inactive));
            read.transpose().map_err(virsh_failure)
        };
        Ok(Self {
            live: read(scope.is_live, false)?,
            config: read(scope.is_config, true)?,
        })
    }

    fn all(&self) -> impl Iterator<Item = &(Domain, String)> {
        self.live.iter().chain(&self.config)
    }

    /// The running one, if it is to be changed.
    fn one(&self) -> &Domain {
        let mut all = self.all();
        &all.next().expect("a scope is live, config or both").0
    }

    /// The name of the new disk. Refuses domains that cannot have it.
    fn target(&self, args: &LibvirtAttachArgs) -> Result<String> {
        let name = &args.domain;
        for (domain, _) in self.all() {
            let finding = check::shared_memory(domain);
            if finding.level == Level::Fail {
                let fix = finding.fix.unwrap_or_default();
                return Err(Failure::new(
                    Kind::Conflict,
                    format!(
                        "the memory of domain '{name}' is not shared, and a Penstock disk needs that"
                    ),
                    format!("shut it down, add {fix} with `virsh edit {name}`, and start it"),
                ));
            }
        }
        let used: Vec<&str> = self
            .all()
            .flat_map(|(domain, _)| domain.targets.iter().map(String::as_str))
            .collect();
        let free = free_target(used.iter().copied());
        let Some(target) = &args.target else {
            return Ok(free);
        };
        match used.contains(&target.as_str()) {
            false => Ok(target.clone()),
            true => Err(Failure::new(
                Kind::Conflict,
                format!("domain '{name}' has a disk {target} already"),
                format!("name another one, like {free}, or leave --target out"),
            )),
        }
    }
}

/// The attachment that the new disk needs.
fn needed(args: &LibvirtAttachArgs, domains: &Domains) -> Result<NeededVolume> {
    let socket = match &args.socket {
        Some(path) => absolute("socket", path)?,
        None => socket_of(&args.volume),
    };
    check_socket(&socket)?;
    let mut all = domains.all();
    if let Some(disk) = all.find_map(|(domain, _)| domain.disk_on(&socket)) {
        return Err(Failure::new(
            Kind::Conflict,
            format!(
                "domain '{}' has {socket} already, as {}",
                args.domain, disk.target
            ),
            "nothing needs to be done; `penstock libvirt check` tells whether it works",
        ));
    }
    let vcpus = u16::try_from(domains.one().vcpus).unwrap_or(u16::MAX);
    let queues = args
        .queues
        .unwrap_or_else(|| vcpus.clamp(1, queues_default()));
    Ok(NeededVolume {
        volume: args.volume.clone(),
        socket,
        queues,
        queue_size: QUEUE_SIZE_MAX,
        is_read_only: args.read_only,
    })
}

fn may_connect(virsh: &Virsh, domain: &Domain, socket: &str) -> Result<()> {
    let capabilities = virsh.capabilities().map_err(virsh_failure)?;
    if let Some(user) = QemuUser::of(domain, &capabilities)
        && let Err(denied) = user.may_connect(Path::new(socket))
    {
        let hint = check::socket_fix(&denied);
        let error = format!("QEMU cannot connect to {socket}: {denied}");
        return Err(match hint {
            Some(hint) => Failure::new(Kind::Denied, error, hint),
            None => Failure::plain(Kind::Denied, error),
        });
    }
    let is_confined = apparmor::is_in_force(&capabilities);
    if is_confined && !apparmor::allows(Path::new("/"), &domain.uuid, socket) {
        return Err(Failure::new(
            Kind::Denied,
            format!("AppArmor would not let QEMU connect to {socket}"),
            format!(
                "allow it: {}; a domain that runs takes new rules by `apparmor_parser -r \
                 /etc/apparmor.d/libvirt/libvirt-{}`",
                apparmor::allow_command(socket),
                domain.uuid
            ),
        ));
    }
    Ok(())
}

/// The failure, after what was done before it is undone.
async fn undone(client: &Client, socket: &str, is_new: bool, failure: Failure) -> Failure {
    if !is_new {
        return failure;
    }
    match attachments::end(client, socket).await {
        Ok(_) => failure,
        Err(second) => Failure::new(
            failure.kind,
            &failure,
            format!("{socket} stays attached ({second}): run `penstock detach {socket}`"),
        ),
    }
}

/// `penstock libvirt detach`.
pub async fn detach(args: LibvirtDetachArgs, global: &Global) -> Result<()> {
    let virsh = Virsh::new(args.connect.connect.clone());
    let scope = scope(&virsh, &args.domain, args.scope)?;
    let domains = Domains::read(&virsh, &args.domain, scope)?;
    let client = locate::client(global).await?;
    let sockets = sockets(&client, &args.volume).await?;
    let find = |domain: &Option<(Domain, String)>| {
        let (domain, text) = domain.as_ref()?;
        let disk = sockets.iter().find_map(|socket| domain.disk_on(socket))?;
        Some((disk.clone(), text[disk.range.clone()].to_owned()))
    };
    let (live, config) = (find(&domains.live), find(&domains.config));
    let Some((disk, _)) = live.as_ref().or(config.as_ref()) else {
        return Err(Failure::new(
            Kind::NotFound,
            format!(
                "volume '{}' is no disk of domain '{}'",
                args.volume, args.domain
            ),
            "see `virsh domblklist` and `penstock attachments list`",
        ));
    };
    if let Some((disk, xml)) = &live {
        unplug(&virsh, &args.domain, disk, xml).await?;
        let kind = ClaimKind::Volume;
        claims::give_up(&claims::of(domains.one(), kind, &args.volume, &disk.socket));
    }
    if let Some((_, xml)) = &config
        && let Err(error) = virsh.detach_device(&args.domain, xml, CONFIG)
    {
        let failure = virsh_failure(error);
        return Err(plugged_again(&virsh, &args.domain, live.as_ref(), failure));
    }
    let metadata = Metadata {
        virsh: &virsh,
        domains: &domains,
    };
    // A disk that is not there any more would keep the domain from its next start.
    metadata.set(|domain| domain.metadata_without(&args.volume, Some(&disk.target)))?;
    let is_used = is_used_elsewhere(&virsh, &args.domain, &disk.socket)?;
    if is_used {
        eprintln!(
            "penstock: the attachment {} stays: the domain still has it {}",
            disk.socket,
            if scope.is_live {
                "at its next start"
            } else {
                "while it runs"
            }
        );
    } else if sockets_attached(&client, &disk.socket).await? {
        attachments::end(&client, &disk.socket).await?;
    }
    let done = Done {
        domain: &domains.one().name,
        volume: &args.volume,
        target: &disk.target,
        socket: &disk.socket,
        live: scope.is_live,
        config: scope.is_config,
    };
    done.tell(global.json, "is no longer disk", ", while it runs")
}

const LIVE: Scope = Scope {
    is_live: true,
    is_config: false,
};
const CONFIG: Scope = Scope {
    is_live: false,
    is_config: true,
};

/// The sockets on which a volume may be a disk: those of its attachments here, and its own.
async fn sockets(client: &Client, volume: &str) -> Result<Vec<String>> {
    let attachments = attachments::list(client).await?;
    let mut sockets: Vec<String> = attachments
        .into_iter()
        .filter(|one| one.volume == volume)
        .map(|one| one.socket)
        .collect();
    sockets.push(socket_of(volume));
    Ok(sockets)
}

async fn sockets_attached(client: &Client, socket: &str) -> Result<bool> {
    let attachments = attachments::list(client).await?;
    Ok(attachments.iter().any(|one| one.socket == socket))
}

/// Whether the domain, as it is now, has a disk on the socket, running or at its next start.
fn is_used_elsewhere(virsh: &Virsh, name: &str, socket: &str) -> Result<bool> {
    for inactive in [false, true] {
        let (domain, _) = virsh.domain(name, inactive).map_err(virsh_failure)?;
        if domain.disk_on(socket).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Asks the guest to let the disk go, and waits until it has. virsh says that it was done when it was asked.
async fn unplug(virsh: &Virsh, name: &str, disk: &VhostUserDisk, xml: &str) -> Result<()> {
    virsh
        .detach_device(name, xml, LIVE)
        .map_err(virsh_failure)?;
    let begin = Instant::now();
    loop {
        let (domain, _) = virsh.domain(name, false).map_err(virsh_failure)?;
        if domain.disk_on(&disk.socket).is_none() {
            return Ok(());
        }
        if begin.elapsed() > UNPLUG_MAX {
            return Err(Failure::new(
                Kind::Conflict,
                format!(
                    "the guest of domain '{name}' does not let {} go",
                    disk.target
                ),
                "repeat this once the guest has booted and has unmounted it, or shut the domain down first",
            ));
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// The failure, after the guest has its disk again.
fn plugged_again(
    virsh: &Virsh,
    name: &str,
    live: Option<&(VhostUserDisk, String)>,
    failure: Failure,
) -> Failure {
    let Some((disk, xml)) = live else {
        return failure;
    };
    match virsh.attach_device(name, xml, LIVE) {
        Ok(()) => failure,
        Err(second) => Failure::new(
            failure.kind,
            &failure,
            format!(
                "the guest has lost {} ({second}): repeat `penstock libvirt attach`",
                disk.target
            ),
        ),
    }
}
