//! `penstock nfs …`.

use api::client::{Client, encode};
use api::failure::Result;
use api::size::Size;
use api::types::{Export, ExportCreate, ExportMove, ExportShownState, NfsStatus};
use hyper::Method;

use crate::args::{ExportCommand, ExportCreateArgs, NfsCommand};
use crate::table::Table;

use super::{confirm, or_dash, print, print_json};

/// Runs a verb.
pub async fn run(verb: NfsCommand, client: &Client, json: bool) -> Result<()> {
    match verb {
        NfsCommand::Status => status(&client.get("/v1/nfs/status").await?, json),
        NfsCommand::Export(verb) => match verb {
            ExportCommand::Create(args) => create(args, client, json).await,
            ExportCommand::List => list(client, json).await,
            ExportCommand::Show { name } => show(&client.get(&path_of(&name)).await?, json),
            ExportCommand::Move { name, to } => move_to(&name, to, client, json).await,
            ExportCommand::Delete { name, yes } => delete(&name, yes, client, json).await,
        },
    }
}

fn path_of(name: &str) -> String {
    format!("/v1/nfs/exports/{}", encode(name))
}

async fn create(args: ExportCreateArgs, client: &Client, json: bool) -> Result<()> {
    let request = ExportCreate {
        name: args.name,
        volume: args.volume,
        size_bytes: args.size.map(|size| size.0),
        pool: args.pool,
        fs: args.fs,
        clients: args.clients,
        read_only: args.read_only,
        root_squash: !args.no_root_squash,
        address: args.address,
    };
    let export: Export = client
        .call(Method::POST, "/v1/nfs/exports", &request)
        .await?;
    if json {
        return print_json(&export);
    }
    eprintln!(
        "penstock: export {} of volume {} is served by {}",
        export.name, export.volume, export.node
    );
    for line in mounts(&export) {
        eprintln!("penstock: clients: {line}");
    }
    Ok(())
}

/// How clients mount it.
fn mounts(export: &Export) -> [String; 2] {
    let address = export
        .address
        .as_deref()
        .and_then(|address| address.split('/').next());
    let source = format!("{}:/{}", address.unwrap_or("ADDRESS-OF-NODE"), export.name);
    [
        format!("mount -t nfs -o vers=4.2 {source} /mnt"),
        format!("mount -t nfs -o vers=4.2,proto=rdma,port=20049 {source} /mnt"),
    ]
}

fn word(state: ExportShownState) -> &'static str {
    match state {
        ExportShownState::Served => "served",
        ExportShownState::Starting => "starting",
        ExportShownState::Moving => "moving",
        ExportShownState::Down => "down",
        ExportShownState::Deleting => "deleting",
    }
}

async fn list(client: &Client, json: bool) -> Result<()> {
    let exports: Vec<Export> = client.get("/v1/nfs/exports").await?;
    match json {
        true => print_json(&exports),
        false => print_table(exports),
    }
}

fn print_table(exports: Vec<Export>) -> Result<()> {
    let mut table = Table::new([
        "NAME", "VOLUME", "NODE", "STATE", "ADDRESS", "CLIENTS", "ACCESS",
    ]);
    for e in exports {
        let access = if e.read_only { "read" } else { "read-write" };
        table.row([
            e.name,
            e.volume,
            e.node,
            word(e.state).to_owned(),
            or_dash(e.address.unwrap_or_default()),
            e.clients.join(","),
            access.to_owned(),
        ]);
    }
    print(|mut out| table.print(&mut out))
}

fn show(export: &Export, json: bool) -> Result<()> {
    if json {
        return print_json(export);
    }
    let access = if export.read_only {
        "read"
    } else {
        "read and write"
    };
    let root = if export.root_squash { "nobody" } else { "root" };
    print(|out| {
        writeln!(out, "name       {}", export.name)?;
        writeln!(out, "volume     {}", export.volume)?;
        writeln!(out, "node       {}", export.node)?;
        let problem = export.problem.as_ref().map(|text| format!(": {text}"));
        writeln!(
            out,
            "state      {}{}",
            word(export.state),
            problem.unwrap_or_default()
        )?;
        writeln!(
            out,
            "address    {}",
            or_dash(export.address.as_deref().unwrap_or_default())
        )?;
        writeln!(
            out,
            "clients    {} may {access}; their root is {root}",
            export.clients.join(", ")
        )?;
        if let (Some(size), Some(free)) = (export.size_bytes, export.free_bytes) {
            writeln!(out, "space      {} of {} free", Size(free), Size(size))?;
        }
        writeln!(out, "fsid       {}", export.fsid)?;
        writeln!(out, "created    {}", export.created_at)?;
        for line in mounts(export) {
            writeln!(out, "mount      {line}")?;
        }
        Ok(())
    })
}

async fn move_to(name: &str, to: String, client: &Client, json: bool) -> Result<()> {
    let path = format!("{}/move", path_of(name));
    let export: Export = client.call(Method::POST, &path, &ExportMove { to }).await?;
    if json {
        return print_json(&export);
    }
    let (name, node) = (&export.name, &export.node);
    match export.state {
        ExportShownState::Served => eprintln!("penstock: export {name} is served by {node}"),
        _ => eprintln!(
            "penstock: export {name} is on its way to {node}; see `penstock nfs export show {name}`"
        ),
    }
    Ok(())
}

async fn delete(name: &str, yes: bool, client: &Client, json: bool) -> Result<()> {
    let export: Export = client.get(&path_of(name)).await?;
    confirm::confirm(&format!("take export '{name}' down"), yes)?;
    client.delete(&path_of(name)).await?;
    if json {
        return print_json(&export);
    }
    eprintln!(
        "penstock: export {name} deleted; volume {} and its data stay",
        export.volume
    );
    Ok(())
}

fn status(status: &NfsStatus, json: bool) -> Result<()> {
    if json {
        return print_json(status);
    }
    print(|out| {
        let role = match (status.is_nfs_node, status.missing.is_empty()) {
            (false, _) => "is no NFS node",
            (true, true) => "is an NFS node",
            (true, false) => "is an NFS node, and cannot serve exports",
        };
        writeln!(out, "node       {} {role}", status.node)?;
        for one in status.missing.iter().filter(|_| status.is_nfs_node) {
            writeln!(out, "missing    {one}")?;
        }
        match &status.server {
            Some(server) => writeln!(
                out,
                "server     {} threads on {}; {} clients{}",
                server.threads,
                server.ports.join(", "),
                server.clients,
                if server.in_grace {
                    "; clients may reclaim"
                } else {
                    ""
                }
            )?,
            None => writeln!(out, "server     does not run")?,
        }
        writeln!(
            out,
            "rdma       {}",
            or_dash(status.rdma_devices.join(", "))
        )?;
        for node in &status.nodes {
            let state = if node.is_up { "up" } else { "down" };
            writeln!(
                out,
                "nfs node   {} {state}, {} exports",
                node.node, node.exports
            )?;
        }
        Ok(())
    })?;
    match status.exports.is_empty() {
        true => Ok(()),
        false => print_table(status.exports.clone()),
    }
}
