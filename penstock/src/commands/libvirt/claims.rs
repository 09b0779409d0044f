//! Who uses which disk: taken when a domain starts or gets a disk, given up when it ends or loses it.

use std::path::Path;

use libvirt::claim::{self, Claim, Claims};
use libvirt::domain::Domain;

use super::attachments;
use crate::api::client::Client;
use crate::failure::{Context, Failure, Kind, Result};

/// This host's.
pub fn all() -> Claims {
    Claims::at(Path::new(claim::DIRECTORY))
}

/// A domain's claim to a socket.
pub fn of(domain: &Domain, volume: &str, socket: &str) -> Claim {
    Claim {
        uuid: domain.uuid.clone(),
        domain: domain.name.clone(),
        volume: volume.to_owned(),
        socket: socket.to_owned(),
    }
}

/// Claims a socket for a domain. False if the domain had claimed it before.
pub async fn take(client: &Client, claim: &Claim) -> Result<bool> {
    let claims = all();
    let had = claims.of(&claim.uuid).contains(claim);
    let what = || format!("note in {} who uses a disk", claim::DIRECTORY);
    let Some(other) = claims.take(claim).context(what)? else {
        return Ok(!had);
    };
    // What nobody is attached to nobody uses.
    let attachments = attachments::list(client).await?;
    if !attachments.iter().any(|one| one.socket == other.socket) {
        claims.give_up(&other).context(what)?;
        if claims.take(claim).context(what)?.is_none() {
            return Ok(true);
        }
    }
    Err(Failure::new(
        Kind::Conflict,
        format!(
            "volume '{}' is a disk of domain '{}'",
            other.volume, other.domain
        ),
        format!(
            "shut that domain down; if it does not run: penstock detach {}",
            other.socket
        ),
    ))
}

/// Gives up a claim. What stays noted is void once the attachment is gone.
pub fn give_up(claim: &Claim) {
    if let Err(error) = all().give_up(claim) {
        eprintln!("penstock: cannot forget who used {}: {error}", claim.socket);
    }
}
