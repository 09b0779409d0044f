//! Who uses which disk or filesystem: taken when a domain starts or gets one, given up when it ends or loses
//! it.

use std::path::Path;

use api::client::Client;
use api::failure::{Context, Failure, Kind, Result};
use libvirt::claim::{self, Claim, ClaimKind, Claims};
use libvirt::domain::Domain;

use super::{attachments, filesystem};

/// This host's.
pub fn all() -> Claims {
    Claims::at(Path::new(claim::DIRECTORY))
}

/// A domain's claim to a socket.
pub fn of(domain: &Domain, kind: ClaimKind, name: &str, socket: &str) -> Claim {
    Claim {
        uuid: domain.uuid.clone(),
        domain: domain.name.clone(),
        name: name.to_owned(),
        kind,
        socket: socket.to_owned(),
    }
}

/// Whether something is attached on the socket of a claim.
pub async fn is_attached(client: &Client, claim: &Claim) -> Result<bool> {
    Ok(match claim.kind {
        ClaimKind::Volume => {
            let all = attachments::list(client).await?;
            all.iter().any(|one| one.socket == claim.socket)
        }
        ClaimKind::Filesystem => {
            let all = filesystem::list(client).await?;
            all.iter().any(|one| one.socket == claim.socket)
        }
    })
}

/// Ends the attachment of a claim, if no guest uses it.
pub async fn end(client: &Client, claim: &Claim) -> Result<()> {
    match claim.kind {
        ClaimKind::Volume => attachments::end(client, &claim.socket).await.map(drop),
        ClaimKind::Filesystem => filesystem::end(client, &claim.socket).await.map(drop),
    }
}

/// Claims a socket for a domain. False if the domain had claimed it before.
pub async fn take(client: &Client, claim: &Claim) -> Result<bool> {
    let claims = all();
    let had = claims.of(&claim.uuid).contains(claim);
    let what = || format!("note in {} who uses a socket", claim::DIRECTORY);
    let Some(other) = claims.take(claim).context(what)? else {
        return Ok(!had);
    };
    // What nobody is attached to nobody uses.
    if !is_attached(client, &other).await? {
        claims.give_up(&other).context(what)?;
        if claims.take(claim).context(what)?.is_none() {
            return Ok(true);
        }
    }
    Err(taken(&other))
}

/// Another domain has the socket.
fn taken(other: &Claim) -> Failure {
    let Claim {
        name,
        domain,
        socket,
        ..
    } = other;
    match other.kind {
        ClaimKind::Volume => Failure::new(
            Kind::Conflict,
            format!("volume '{name}' is a disk of domain '{domain}'"),
            format!("shut that domain down; if it does not run: penstock detach {socket}"),
        ),
        ClaimKind::Filesystem => Failure::new(
            Kind::Conflict,
            format!("domain '{domain}' uses filesystem '{name}' on {socket}"),
            format!(
                "give each domain a socket of its own; if that one does not run: penstock detach {socket}"
            ),
        ),
    }
}

/// Gives up a claim. What stays noted is void once the attachment is gone.
pub fn give_up(claim: &Claim) {
    if let Err(error) = all().give_up(claim) {
        eprintln!("penstock: cannot forget who used {}: {error}", claim.socket);
    }
}
