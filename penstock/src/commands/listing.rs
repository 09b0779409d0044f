//! Commands that show things.

use std::process::ExitCode;

use crate::api::client::Client;
use crate::api::types::{
    Attachment, AttachmentState, Device, DeviceState, Health, HealthState, Pool, Status, Volume,
};
use crate::failure::Result;
use crate::serve::limits::{ATTACHMENTS, open_files_needed};
use crate::size::Size;
use crate::table::Table;

use super::{print, print_json};

/// `penstock status`.
pub async fn status(client: &Client, json: bool) -> Result<()> {
    let status: Status = client.get("/v1/status").await?;
    if json {
        return print_json(&status);
    }
    let percent = (status.used_bytes * 100)
        .checked_div(status.capacity_bytes)
        .unwrap_or(0);
    print(|out| {
        writeln!(out, "health       {}", health_line(&status.health))?;
        writeln!(
            out,
            "node         version {}, pid {}, up {}",
            status.version,
            status.pid,
            uptime(status.uptime_s)
        )?;
        writeln!(out, "cluster      {}", status.cluster_id)?;
        writeln!(out, "roles        {}", status.roles.join(", "))?;
        writeln!(out, "data         {}", status.data.display())?;
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
        for line in &status.recovery {
            writeln!(out, "recovery     {line}")?;
        }
        Ok(())
    })
}

fn open_files(max: u64) -> String {
    match max < open_files_needed() {
        true => format!(
            "at most {max}, too few for {ATTACHMENTS} attachments: raise the daemon's hard limit (systemd: LimitNOFILE=)"
        ),
        false => format!("at most {max}"),
    }
}

/// `penstock health`: its exit code is 1 when a human must act.
pub async fn health(client: &Client, json: bool) -> Result<ExitCode> {
    let health: Health = client.get("/v1/health").await?;
    if json {
        print_json(&health)?;
    } else {
        print(|out| writeln!(out, "{}", health_line(&health)))?;
    }
    Ok(match health.state {
        HealthState::Ok => ExitCode::SUCCESS,
        HealthState::Degraded => ExitCode::FAILURE,
    })
}

fn health_line(health: &Health) -> String {
    match health.state {
        HealthState::Ok => "ok".to_owned(),
        HealthState::Degraded => format!("degraded: {}", health.problems.join("; ")),
    }
}

/// `penstock volume list`.
pub async fn volumes(client: &Client, json: bool) -> Result<()> {
    let volumes: Vec<Volume> = client.get("/v1/volumes").await?;
    if json {
        return print_json(&volumes);
    }
    let mut table = Table::new(["NAME", ">SIZE", "POOL", "ATTACHED"]);
    for v in volumes {
        table.row([
            v.name,
            Size(v.size_bytes).to_string(),
            v.pool,
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
        writeln!(
            out,
            "size        {} ({} bytes)",
            Size(volume.size_bytes),
            volume.size_bytes
        )?;
        writeln!(out, "pool        {}", volume.pool)?;
        writeln!(out, "generation  {}", volume.generation)?;
        writeln!(out, "attached    {}", or_dash(volume.attached.join(" ")))
    })
}

/// `penstock attachments list`.
pub async fn attachments(client: &Client, json: bool) -> Result<()> {
    let attachments: Vec<Attachment> = client.get("/v1/attachments").await?;
    if json {
        return print_json(&attachments);
    }
    let mut table = Table::new([
        "VOLUME", "SOCKET", "STATE", "QUEUES", "MODE", ">READS", ">WRITES", ">ERRORS",
    ]);
    for a in attachments {
        let state = match a.state {
            AttachmentState::Listening => "listening",
            AttachmentState::Connected => "connected",
            AttachmentState::Detaching => "detaching",
            AttachmentState::Failed => "failed",
        };
        table.row([
            a.volume,
            a.socket,
            state.to_owned(),
            format!("{}/{}", a.queues_running, a.queues),
            if a.read_only { "ro" } else { "rw" }.to_owned(),
            a.counters.reads.to_string(),
            a.counters.writes.to_string(),
            a.counters.errors.to_string(),
        ]);
    }
    print(|mut out| table.print(&mut out))
}

/// `penstock device list`.
pub async fn devices(client: &Client, json: bool) -> Result<()> {
    let devices: Vec<Device> = client.get("/v1/devices").await?;
    if json {
        return print_json(&devices);
    }
    let mut table = Table::new(["DEVICE", "STATE", ">CAPACITY", ">USED", ">FREE", "SCRUB"]);
    for d in devices {
        let state = match d.state {
            DeviceState::Ok => "ok",
            DeviceState::Degraded => "degraded",
            DeviceState::Null => "null",
        };
        let scrub = format!(
            "{} passes, {} blocks, {} errors",
            d.scrub.passes, d.scrub.blocks, d.scrub.errors
        );
        let size = |bytes| Size(bytes).to_string();
        table.row([
            d.path,
            state.to_owned(),
            size(d.capacity_bytes),
            size(d.used_bytes),
            size(d.free_bytes),
            scrub,
        ]);
    }
    print(|mut out| table.print(&mut out))
}

/// `penstock pool list`.
pub async fn pools(client: &Client, json: bool) -> Result<()> {
    let pools: Vec<Pool> = client.get("/v1/pools").await?;
    if json {
        return print_json(&pools);
    }
    let mut table = Table::new(["NAME", ">REPLICAS", ">VOLUMES"]);
    for p in pools {
        table.row([p.name, p.replicas.to_string(), p.volumes.to_string()]);
    }
    print(|mut out| table.print(&mut out))
}

fn or_dash(text: String) -> String {
    if text.is_empty() {
        "-".to_owned()
    } else {
        text
    }
}

fn uptime(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, m) => format!("{m} min"),
        (0, h, m) => format!("{h} h {m} min"),
        (d, h, _) => format!("{d} d {h} h"),
    }
}
