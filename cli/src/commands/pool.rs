//! `penstock pool …`.

use api::client::{Client, encode};
use api::failure::Result;
use api::size::Size;
use api::types::{Pool, PoolCreate, PoolSet};
use hyper::Method;

use crate::args::PoolCommand;
use crate::table::Table;

use super::{confirm, print, print_json};

/// Runs a verb.
pub async fn run(verb: PoolCommand, client: &Client, json: bool) -> Result<()> {
    match verb {
        PoolCommand::Create {
            name,
            replicas,
            min_in_sync,
            failure_domain,
            class,
        } => {
            let request = PoolCreate {
                name,
                replicas,
                min_in_sync,
                failure_domain,
                class,
            };
            create(client, json, &request).await
        }
        PoolCommand::List => list(client, json).await,
        PoolCommand::Show { name } => show(&get(client, &name).await?, json),
        PoolCommand::Set {
            name,
            replicas,
            min_in_sync,
            yes,
        } => {
            let request = PoolSet {
                replicas,
                min_in_sync,
            };
            set(client, json, &name, (&request, yes)).await
        }
        PoolCommand::Delete { name, yes } => delete(client, json, &name, yes).await,
    }
}

fn path_of(name: &str) -> String {
    format!("/v1/pools/{}", encode(name))
}

async fn get(client: &Client, name: &str) -> Result<Pool> {
    client.get(&path_of(name)).await
}

async fn create(client: &Client, json: bool, request: &PoolCreate) -> Result<()> {
    let pool: Pool = client.call(Method::POST, "/v1/pools", request).await?;
    if pool.groups.degraded > 0 {
        warn_of_few(&pool);
    }
    warn_of_all_needed(&pool);
    if json {
        return print_json(&pool);
    }
    eprintln!("penstock: pool {} created", pool.name);
    Ok(())
}

/// Writes that need all replicas outlive the loss of none.
fn warn_of_all_needed(pool: &Pool) {
    if pool.replicas > 1 && pool.min_in_sync == pool.replicas {
        eprintln!(
            "penstock: writes to pool {0} wait whenever one of its {1} replicas is missing; `penstock pool \
             set {0} --min-in-sync {2}` lets them go on",
            pool.name,
            pool.replicas,
            pool.replicas - 1
        );
    }
}

fn warn_of_few(pool: &Pool) {
    eprintln!(
        "penstock: pool {} cannot have {} replicas on different {}s yet: add devices, with `penstock device \
         add` or by another node that joins",
        pool.name,
        pool.replicas,
        word(pool)
    );
}

async fn set(
    client: &Client,
    json: bool,
    name: &str,
    (request, yes): (&PoolSet, bool),
) -> Result<()> {
    let now = get(client, name).await?.replicas;
    if let Some(replicas) = request.replicas.filter(|replicas| *replicas < now) {
        let what = format!("keep {replicas} of the {now} copies of all data in pool '{name}'");
        confirm::confirm(&what, yes)?;
    }
    let pool: Pool = client.call(Method::PATCH, &path_of(name), request).await?;
    if pool.devices < usize::from(pool.replicas) {
        warn_of_few(&pool);
    } else if pool.groups.degraded > 0 {
        eprintln!(
            "penstock: copies are made in the background; `penstock pool show {name}` says how far it is"
        );
    }
    warn_of_all_needed(&pool);
    if json {
        return print_json(&pool);
    }
    eprintln!(
        "penstock: pool {name} has {} replicas now, {} in sync for a write",
        pool.replicas, pool.min_in_sync
    );
    Ok(())
}

async fn delete(client: &Client, json: bool, name: &str, yes: bool) -> Result<()> {
    let pool = get(client, name).await?;
    confirm::confirm(&format!("delete pool '{name}'"), yes)?;
    client.delete(&path_of(name)).await?;
    if json {
        return print_json(&pool);
    }
    eprintln!("penstock: pool {name} deleted");
    Ok(())
}

async fn list(client: &Client, json: bool) -> Result<()> {
    let pools: Vec<Pool> = client.get("/v1/pools").await?;
    if json {
        return print_json(&pools);
    }
    let mut table = Table::new([
        "NAME",
        ">REPLICAS",
        ">MIN",
        "APART",
        "CLASS",
        ">VOLUMES",
        ">IN SYNC",
        ">DEGRADED",
        ">PROVISIONED",
        ">USABLE",
        ">FREE",
        ">RAW",
        ">RAW USED",
    ]);
    for p in pools {
        let apart = word(&p).to_owned();
        table.row([
            p.name,
            p.replicas.to_string(),
            p.min_in_sync.to_string(),
            apart,
            p.class.unwrap_or_else(|| "any".to_owned()),
            p.volumes.to_string(),
            format!("{}/{}", p.groups.in_sync, p.groups.total),
            p.groups.degraded.to_string(),
            Size(p.provisioned_bytes).to_string(),
            Size(p.usable_bytes).to_string(),
            Size(p.usable_free_bytes).to_string(),
            Size(p.capacity_bytes).to_string(),
            Size(p.used_bytes).to_string(),
        ]);
    }
    print(|mut out| table.print(&mut out))
}

fn show(pool: &Pool, json: bool) -> Result<()> {
    if json {
        return print_json(pool);
    }
    let groups = &pool.groups;
    let unreported = match pool.devices_unreported {
        0 => String::new(),
        n => format!("; {n} do not report"),
    };
    print(|out| {
        writeln!(out, "name       {}", pool.name)?;
        writeln!(
            out,
            "replicas   {} on different {}s, {} in sync for a write",
            pool.replicas,
            word(pool),
            pool.min_in_sync
        )?;
        let class = pool.class.as_deref().unwrap_or("any");
        writeln!(out, "devices    {} of class {class}", pool.devices)?;
        writeln!(
            out,
            "space      {} for volumes, {} free",
            Size(pool.usable_bytes),
            Size(pool.usable_free_bytes)
        )?;
        writeln!(
            out,
            "raw        {} of {} used, {} free, all copies counted{unreported}",
            Size(pool.used_bytes),
            Size(pool.capacity_bytes),
            Size(pool.free_bytes)
        )?;
        writeln!(
            out,
            "volumes    {}, which may grow to {}",
            pool.volumes,
            Size(pool.provisioned_bytes)
        )?;
        writeln!(
            out,
            "groups     {}: {} in sync, {} degraded, {} waiting, {} syncing, {} moving",
            groups.total,
            groups.in_sync,
            groups.degraded,
            groups.waiting,
            groups.syncing,
            groups.moving
        )?;
        writeln!(out, "created    {}", pool.created_at)
    })
}

fn word(pool: &Pool) -> &'static str {
    use api::types::FailureDomain;
    match pool.failure_domain {
        FailureDomain::Device => "device",
        FailureDomain::Node => "node",
        FailureDomain::Host => "host",
        FailureDomain::Rack => "rack",
    }
}
