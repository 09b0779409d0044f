//! Attaching and detaching.

mod filesystem;

use std::path::Path;
use std::time::Duration;

use api::client::{Client, encode};
use api::failure::{Kind, Result};
use api::moment::Moment;
use api::types::{
    Attach, Attachment, AttachmentState, Detached, Move, Moved, OfferCreate, Offered,
};
use hyper::Method;
use meta::UnixMillis;

use crate::args::{AttachCommand, DetachArgs};

use super::attachments::Attachments;
use super::{absolute, confirm, path_or_name, print, print_json};

/// `penstock attach …`.
pub async fn attach(verb: AttachCommand, client: &Client, json: bool) -> Result<()> {
    match verb {
        AttachCommand::Fs(args) => filesystem::attach(args, client, json).await,
        AttachCommand::Volume {
            name,
            socket,
            block,
            queues,
            queue_size,
            read_only,
            no_pin,
            incoming,
        } => {
            let socket = socket.map(|path| absolute("socket", &path)).transpose()?;
            let request = Attach {
                volume: name,
                socket: socket.unwrap_or_default(),
                block,
                queues,
                queue_size,
                read_only,
                pin_memory: !no_pin,
                incoming,
            };
            attach_volume(&request, client, json).await
        }
    }
}

async fn attach_volume(request: &Attach, client: &Client, json: bool) -> Result<()> {
    let attachment: Attachment = client
        .call(Method::POST, "/v1/attachments", request)
        .await?;
    if json {
        return print_json(&attachment);
    }
    let (volume, socket) = (&attachment.volume, &attachment.socket);
    if let Some(device) = &attachment.block_device {
        eprintln!("penstock: volume {volume} is block device {device}");
        return print(|out| writeln!(out, "{socket}"));
    }
    match attachment.incoming {
        true => eprintln!(
            "penstock: volume {volume} comes in on {socket}: its guest goes on here once it is migrated"
        ),
        false => eprintln!("penstock: volume {volume} is served on {socket}"),
    }
    Ok(())
}

/// Returns the typed socket or name. The relative path of a socket becomes absolute.
async fn volume_target(typed: &str, client: &Client) -> Result<String> {
    let attachments: Vec<Attachment> = client.get("/v1/attachments").await?;
    let sockets = attachments.iter().map(|a| a.socket.as_str());
    let is_name = attachments.iter().any(|a| a.volume == typed);
    path_or_name("socket", typed, is_name, sockets)
}

/// `penstock attachment offer`.
pub async fn offer(
    target: &str,
    to: String,
    expires: Duration,
    client: &Client,
    json: bool,
) -> Result<()> {
    let request = OfferCreate {
        target: volume_target(target, client).await?,
        to,
        lifetime_s: expires.as_secs(),
    };
    let offered: Offered = client
        .call(Method::POST, "/v1/attachments/offer", &request)
        .await?;
    if json {
        return print_json(&offered);
    }
    if let Some(offer) = &offered.offer {
        eprintln!(
            "penstock: volume {} of node {} is offered to node {} until {}",
            offered.volume,
            offered.node,
            offer.to,
            Moment::from(UnixMillis(offer.expires_at_ms))
        );
    }
    Ok(())
}

/// `penstock attachment withdraw`.
pub async fn withdraw(target: &str, client: &Client, json: bool) -> Result<()> {
    let target = volume_target(target, client).await?;
    let path = format!("/v1/attachments/offer?target={}", encode(&target));
    let withdrawn: Offered = client.call(Method::DELETE, &path, &()).await?;
    if json {
        return print_json(&withdrawn);
    }
    eprintln!(
        "penstock: the offer of volume {} of node {} is withdrawn",
        withdrawn.volume, withdrawn.node
    );
    Ok(())
}

/// `penstock attachment move`.
pub async fn move_to(
    target: &str,
    to: String,
    socket: Option<&Path>,
    client: &Client,
    json: bool,
) -> Result<()> {
    let request = Move {
        target: volume_target(target, client).await?,
        to,
        socket: socket.map(|path| absolute("socket", path)).transpose()?,
    };
    let moved: Moved = client
        .call(Method::POST, "/v1/attachments/move", &request)
        .await?;
    if json {
        return print_json(&moved);
    }
    eprintln!(
        "penstock: volume {} is served on {} of node {}",
        moved.volume, moved.socket, moved.node
    );
    Ok(())
}

/// `penstock detach`.
pub async fn detach(args: &DetachArgs, client: &Client, json: bool) -> Result<()> {
    let all = Attachments::read(client).await?;
    let target = all.target(&args.target)?;
    let filesystem = match args.node {
        None => all.filesystem(&target)?,
        Some(_) => None,
    };
    match filesystem {
        Some(attachment) => filesystem::detach(attachment, args, client, json).await,
        None => match detach_volume(&all.volumes, &target, args, client, json).await {
            Err(failure) if args.force && failure.kind == Kind::NotFound => {
                filesystem::forget(&target, args, client, json, failure).await
            }
            done => done,
        },
    }
}

async fn detach_volume(
    attachments: &[Attachment],
    target: &str,
    args: &DetachArgs,
    client: &Client,
    json: bool,
) -> Result<()> {
    let yes = args.yes;
    let mut meant = attachments
        .iter()
        .filter(|a| a.socket == target || a.volume == target)
        .peekable();
    let forget = args.force && (args.node.is_some() || meant.peek().is_none());
    // Whether somebody uses a block device, the kernel knows.
    let connected = meant.find(|a| {
        !forget && a.state == AttachmentState::Connected && (a.block_device.is_none() || yes)
    });
    if let Some(a) = connected {
        confirm::confirm(&format!("detach {}, which a guest is using", a.socket), yes)?;
    }
    if forget {
        let what = format!(
            "forget where '{target}' is attached on a node that is down, whose guest loses it if it still \
             runs there"
        );
        confirm::confirm(&what, yes)?;
    }
    let node = args.node.iter();
    let node: String = node.map(|name| format!("&node={}", encode(name))).collect();
    let path = format!(
        "/v1/attachments?target={}&force={}&forget={forget}{node}",
        encode(target),
        connected.is_some()
    );
    let detached: Detached = client.call(Method::DELETE, &path, &()).await?;
    if json {
        return print_json(&detached);
    }
    match forget {
        true => eprintln!(
            "penstock: forgot that {} was attached at {} on node {}",
            detached.volume, detached.socket, detached.node
        ),
        false => eprintln!("penstock: detached {target}"),
    }
    Ok(())
}
