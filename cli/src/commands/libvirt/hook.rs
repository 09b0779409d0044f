//! `penstock libvirt hook …`: what libvirt runs when a domain starts and ends.

use std::io::{IsTerminal, Read};
use std::path::Path;

use api::client::Client;
use api::failure::{Context, Failure, Kind, Result};
use libvirt::claim::{Claim, ClaimKind};
use libvirt::domain::{Domain, DomainError, NeededFilesystem, NeededVolume};
use libvirt::hook::{self, Call, Event, HookError};
use libvirt::xml::TEXT_BYTES_MAX;

use crate::args::Global;
use crate::commands::{absolute, locate};

use super::attachments::{self, Ready, Source};
use super::{claims, domain_failure, filesystem};

/// `penstock libvirt hook install`.
pub fn install(global: &Global) -> Result<()> {
    let program = std::env::current_exe().context(|| "find this program's file".into())?;
    let mut options = Vec::new();
    if let Some(api) = &global.api {
        options.extend(["--api".to_owned(), api.clone()]);
    }
    if let Some(data) = &global.data {
        options.extend(["--data".to_owned(), absolute("data", data)?]);
    }
    let script = hook::script(&program, &options).map_err(hook_failure)?;
    let path = hook::install(Path::new(hook::DIRECTORY), &script).map_err(hook_failure)?;
    eprintln!(
        "penstock: wrote {}; restart libvirt so that it finds it (systemctl restart libvirtd): running \
         guests do not notice",
        path.display()
    );
    Ok(())
}

/// `penstock libvirt hook remove`.
pub fn remove() -> Result<()> {
    let directory = Path::new(hook::DIRECTORY);
    let path = directory.join(hook::NAME);
    match hook::remove(directory).map_err(hook_failure)? {
        true => eprintln!("penstock: removed {}", path.display()),
        false => eprintln!("penstock: there is no {}", path.display()),
    }
    Ok(())
}

/// `penstock libvirt hook run`. What it prints on standard error virsh shows, if it fails.
pub async fn run(arguments: &[String], global: &Global) -> Result<()> {
    let call = Call::parse(arguments).map_err(hook_failure)?;
    let Some(domain) = domain(&call)? else {
        return Ok(());
    };
    let host = Host { global };
    match call.event {
        Event::Start => host.prepare(&domain, Source::Fresh).await,
        Event::Arrival => host.prepare(&domain, Source::Incoming).await,
        Event::Reconnect => {
            host.recover(&domain).await;
            Ok(())
        }
        Event::End => host.release(&domain).await,
        Event::Other => Ok(()),
    }
}

/// The domain on standard input; none if the call is of nothing to do.
fn domain(call: &Call) -> Result<Option<Domain>> {
    if call.event == Event::Other {
        return Ok(None);
    }
    let input = std::io::stdin();
    if input.is_terminal() {
        return Err(Failure::new(
            Kind::Failed,
            "no domain's XML on standard input",
            "libvirt runs this: see `penstock libvirt hook install`",
        ));
    }
    let mut text = Vec::new();
    let limit = TEXT_BYTES_MAX as u64 + 1;
    input
        .lock()
        .take(limit)
        .read_to_end(&mut text)
        .context(|| "read the domain's XML".into())?;
    let text = String::from_utf8_lossy(&text);
    Domain::parse(&text)
        .map(Some)
        .map_err(|error| domain_failure(&error))
}

/// What a domain needs attached.
enum Needed {
    Volume(NeededVolume),
    Filesystem(NeededFilesystem),
}

impl Needed {
    fn all_of(domain: &Domain) -> Result<Vec<Self>, DomainError> {
        let (volumes, filesystems) = (domain.needed()?, domain.needed_filesystems()?);
        Ok(Self::both(volumes, filesystems))
    }

    /// What can be understood of it.
    fn known_of(domain: &Domain) -> Vec<Self> {
        let (volumes, filesystems) = (domain.needed(), domain.needed_filesystems());
        Self::both(volumes.unwrap_or_default(), filesystems.unwrap_or_default())
    }

    fn both(volumes: Vec<NeededVolume>, filesystems: Vec<NeededFilesystem>) -> Vec<Self> {
        let volumes = volumes.into_iter().map(Self::Volume);
        let filesystems = filesystems.into_iter().map(Self::Filesystem);
        volumes.chain(filesystems).collect()
    }

    fn claim(&self, domain: &Domain) -> Claim {
        let (kind, name, socket) = match self {
            Self::Volume(one) => (ClaimKind::Volume, &one.volume, &one.socket),
            Self::Filesystem(one) => (ClaimKind::Filesystem, &one.filesystem, &one.socket),
        };
        claims::of(domain, kind, name, socket)
    }
}

struct Host<'a> {
    global: &'a Global,
}

impl Host<'_> {
    /// Attaches what a domain needs: all of it, or nothing.
    async fn prepare(&self, domain: &Domain, source: Source) -> Result<()> {
        let needed = Needed::all_of(domain).map_err(|error| domain_failure(&error))?;
        if needed.is_empty() {
            // Domains that have nothing of Penstock's start without a daemon, too.
            return Ok(());
        }
        let client = locate::client(self.global).await?;
        let known = claims::all().of(&domain.uuid);
        let mut made = Vec::new();
        for one in &needed {
            match self.attach(&client, domain, one, source).await {
                Ok(is_new) => made.push((one.claim(domain), is_new)),
                Err(failure) => {
                    self.undo(&client, &known, made).await;
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    /// True if the attachment was made just now.
    async fn attach(
        &self,
        client: &Client,
        domain: &Domain,
        needed: &Needed,
        source: Source,
    ) -> Result<bool> {
        let claim = needed.claim(domain);
        let is_own = claims::take(client, &claim).await?;
        let attached = match needed {
            Needed::Volume(volume) => {
                let ready = attachments::ready(client, volume, source).await;
                ready.map(|Ready { is_new, .. }| is_new)
            }
            Needed::Filesystem(one) => filesystem::ready(client, one).await,
        };
        if attached.is_err() && is_own {
            claims::give_up(&claim);
        }
        attached
    }

    /// Takes back what a start has got that is not to be.
    async fn undo(&self, client: &Client, known: &[Claim], made: Vec<(Claim, bool)>) {
        for (claim, is_new) in made {
            if is_new && let Err(failure) = claims::end(client, &claim).await {
                eprintln!("penstock: {} stays attached: {failure}", claim.socket);
            } else if !known.contains(&claim) {
                claims::give_up(&claim);
            }
        }
    }

    /// Detaches what a domain had, if nobody else has connected to it.
    async fn release(&self, domain: &Domain) -> Result<()> {
        let own = claims::all().of(&domain.uuid);
        if own.is_empty() {
            return Ok(());
        }
        let client = locate::client(self.global).await?;
        let mut last = Ok(());
        for claim in own {
            let ended = match claims::is_attached(&client, &claim).await? {
                true => claims::end(&client, &claim).await,
                false => Ok(()),
            };
            // A guest that was migrated takes its attachment along, perhaps just now.
            let ended = match ended {
                Err(_) if !claims::is_attached(&client, &claim).await? => Ok(()),
                ended => ended,
            };
            match ended {
                Ok(()) => claims::give_up(&claim),
                Err(failure) => last = Err(failure),
            }
        }
        last
    }

    /// Sees to it that a guest that runs has what it needs. A failure is told, and is none of the hook's:
    /// libvirt would kill the guest.
    async fn recover(&self, domain: &Domain) {
        let needed = Needed::known_of(domain);
        if needed.is_empty() {
            return;
        }
        let client = match locate::client(self.global).await {
            Ok(client) => client,
            Err(failure) => return eprintln!("penstock: {failure}"),
        };
        for one in &needed {
            let claim = one.claim(domain);
            let told = match claims::is_attached(&client, &claim).await {
                Ok(true) => Ok(()),
                Ok(false) => recover_one(&client, one).await,
                Err(failure) => Err(failure),
            };
            let noted = claims::all().take(&claim);
            if let Err(failure) = told {
                eprintln!("penstock: {} {}: {failure}", claim.kind.word(), claim.name);
            }
            if let Err(error) = noted {
                eprintln!("penstock: cannot note who uses {}: {error}", claim.socket);
            }
        }
    }
}

/// Attaches what a guest that runs has lost.
async fn recover_one(client: &Client, needed: &Needed) -> Result<()> {
    match needed {
        Needed::Volume(volume) => {
            let made = attachments::create(client, volume, Source::Fresh).await;
            made.map(drop)
        }
        // QEMU connects a virtio-fs device once: a new socket would be one that nobody looks for.
        Needed::Filesystem(one) => Err(Failure::new(
            Kind::Conflict,
            format!("nothing serves {} any more", one.socket),
            "shut the domain down and start it, to mount it again",
        )),
    }
}

fn hook_failure(error: HookError) -> Failure {
    match &error {
        HookError::Arguments(_) => Failure::new(
            Kind::Failed,
            &error,
            "libvirt runs this: see `penstock libvirt hook install`",
        ),
        HookError::Foreign(_) => Failure::new(
            Kind::Conflict,
            &error,
            "move it away, or remove it by hand if nobody needs it",
        ),
        HookError::NoLibvirt(_) => Failure::new(
            Kind::NotFound,
            &error,
            "install libvirt-daemon-system first",
        ),
        HookError::File(_, _, source) if source.kind() == std::io::ErrorKind::PermissionDenied => {
            Failure::new(Kind::Denied, &error, "run this as root")
        }
        HookError::NotText(_) | HookError::File(..) => Failure::plain(Kind::Failed, &error),
    }
}
