//! Commands that show things.

use api::client::Client;
use api::failure::Result;
use api::moment::{Moment, duration};
use api::size::Size;
use api::types::{PeerTransport, Privileges, Problem, Status, Volume};
use sandbox::limits::{ATTACHMENTS, open_files_needed};

use crate::table::Table;

use super::health::health_word;
use super::{or_dash, print, print_json};

/// `penstock status`.
pub async fn status(client: &Client, json: bool) -> Result<()> {
    let status: Status = client.get("/v1/status").await?;
    if json {
        return print_json(&status);
    }
    let now = Moment::now();
    let percent = (status.used_bytes * 100)
        .checked_div(status.capacity_bytes)
        .unwrap_or(0);
    print(|out| {
        writeln!(out, "health       {}", health_word(&status.health))?;
        for problem in &status.health.problems {
            writeln!(out, "problem      {}", problem_line(problem, now))?;
        }
        for work in &status.health.background_jobs {
            writeln!(out, "under way    {}", problem_line(work, now))?;
        }
        for notice in &status.health.notices {
            writeln!(out, "notice       {}", problem_line(notice, now))?;
        }
        writeln!(
            out,
            "node         version {}, pid {}, up {}",
            status.version,
            status.pid,
            duration(status.uptime_s)
        )?;
        writeln!(
            out,
            "cluster      {}, feature level {}",
            status.cluster_id, status.feature_level
        )?;
        writeln!(out, "roles        {}", status.roles.join(", "))?;
        writeln!(out, "data         {}", status.data.display())?;
        if status.is_starting {
            // The rest is not known yet.
            return Ok(());
        }
        writeln!(
            out,
            "store        {}, {} of {} used ({percent}%)",
            status.store,
            Size(status.used_bytes),
            Size(status.capacity_bytes)
        )?;
        writeln!(out, "threads      {} data", status.threads)?;
        writeln!(out, "open files   {}", open_files(status.open_files_max))?;
        writeln!(out, "volumes      {}", status.volumes)?;
        writeln!(
            out,
            "attachments  {}, {} with a guest",
            status.attachments, status.guests
        )?;
        writeln!(out, "privileges   {}", privileges_line(&status.privileges))?;
        if !status.block_devices.is_empty() {
            writeln!(out, "block        {}", status.block_devices)?;
        }
        for line in &status.recovery {
            writeln!(out, "recovery     {line}")?;
        }
        for told in &status.transports {
            writeln!(out, "transport    {}", transport_line(told))?;
        }
        Ok(())
    })
}

fn privileges_line(told: &Privileges) -> String {
    let capabilities = match told.capabilities.as_slice() {
        [] => "no capabilities".to_owned(),
        names => format!("capabilities {}", names.join(", ")),
    };
    let mut parts = vec![format!("user {} ({})", told.user, told.uid), capabilities];
    let no = |is_on: bool, name: &str| match is_on {
        true => name.to_owned(),
        false => format!("no {name}"),
    };
    parts.push(no(told.no_new_privs, "no_new_privs"));
    parts.push(no(told.seccomp, "seccomp"));
    parts.push(match told.landlock_abi {
        Some(abi) => format!("landlock version {abi}"),
        None => "no landlock".to_owned(),
    });
    parts.join("; ")
}

fn transport_line(told: &PeerTransport) -> String {
    let ways = match (told.rdma, told.tcp) {
        (0, _) => "TCP".to_owned(),
        (_, 0) => "RDMA".to_owned(),
        (rdma, tcp) => format!("RDMA on {rdma} connections, TCP on {tcp}"),
    };
    let reason = told.why_not_rdma.iter().map(|why| format!(" ({why})"));
    format!("{ways} to {}{}", told.node, reason.collect::<String>())
}

fn open_files(max: u64) -> String {
    match max < open_files_needed() {
        true => format!(
            "at most {max}, too few for {ATTACHMENTS} attachments: raise the daemon's hard limit (systemd: \
             LimitNOFILE=)"
        ),
        false => format!("at most {max}"),
    }
}

/// What (since when; what is done; how long that takes).
fn problem_line(problem: &Problem, now: Moment) -> String {
    let mut more = Vec::new();
    if let Some(since) = problem.since {
        let ago = duration(since.seconds_until(now));
        more.push(format!("since {since}, {ago} ago"));
    }
    if !problem.doing.is_empty() {
        more.push(problem.doing.clone());
    }
    if let Some(eta_s) = problem.eta_s {
        more.push(format!("about {} left", duration(eta_s)));
    }
    match more.is_empty() {
        true => problem.what.clone(),
        false => format!("{} ({})", problem.what, more.join("; ")),
    }
}

/// `penstock volume list`.
pub async fn volumes(client: &Client, json: bool) -> Result<()> {
    let volumes: Vec<Volume> = client.get("/v1/volumes").await?;
    if json {
        return print_json(&volumes);
    }
    let mut table = Table::new(["NAME", ">SIZE", ">USED", "POOL", "NODE", "ATTACHED"]);
    for v in volumes {
        table.row([
            v.name,
            Size(v.size_bytes).to_string(),
            or_dash(
                v.used_bytes
                    .map_or_else(String::new, |used| Size(used).to_string()),
            ),
            v.pool,
            or_dash(v.attached_on.join(" ")),
            or_dash(v.attached.join(" ")),
        ]);
    }
    print(|mut out| table.print(&mut out))
}

/// `penstock volume show`.
pub fn volume(volume: &Volume, json: bool) -> Result<()> {
    if json {
        return print_json(volume);
    }
    print(|out| {
        writeln!(out, "name        {}", volume.name)?;
        writeln!(out, "id          {}", volume.id)?;
        let serial = &volume.serial;
        writeln!(
            out,
            "serial      {serial} (in the guest /dev/disk/by-id/virtio-{serial})"
        )?;
        writeln!(
            out,
            "size        {} ({} bytes)",
            Size(volume.size_bytes),
            volume.size_bytes
        )?;
        match volume.used_bytes {
            Some(used) => writeln!(out, "used        {} ({used} bytes)", Size(used))?,
            None => writeln!(out, "used        -")?,
        }
        writeln!(out, "pool        {}", volume.pool)?;
        match volume.on_full_wait_s {
            0 => writeln!(out, "on full     writes fail")?,
            wait_s => writeln!(
                out,
                "on full     writes wait {}, then fail",
                duration(wait_s.into())
            )?,
        }
        writeln!(out, "generation  {}", volume.generation)?;
        writeln!(out, "attached    {}", or_dash(volume.attached.join(" ")))
    })
}
