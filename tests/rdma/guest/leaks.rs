//! Nothing stays of what was made and dropped.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use fabric_rdma::verbs::completion::CompletionChannel;
use fabric_rdma::verbs::context::Context;
use fabric_rdma::verbs::memory::ProtectionDomain;
use fabric_rdma::verbs::window::MemoryWindow;

use super::kit::{Memory, connected_with, open, open_device, patience};

/// What the kernel and this process hold.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    /// `rdma resource`: numbers of protection domains, completion queues, queue pairs, regions, contexts.
    resources: String,
    descriptors: usize,
}

fn held() -> Result<Held> {
    let output = Command::new("rdma")
        .args(["resource", "show", "rxe0"])
        .output()
        .context("run rdma")?;
    ensure!(output.status.success(), "rdma: {output:?}");
    let text = String::from_utf8(output.stdout)?;
    ensure!(
        text.contains("qp ") && text.contains("mr "),
        "rdma says {text:?}"
    );
    Ok(Held {
        resources: text.trim().to_owned(),
        descriptors: std::fs::read_dir("/proc/self/fd")?.count(),
    })
}

/// Registers and closes memory, and makes and drops connections with all that belongs to them, often.
pub fn none(registrations: usize, pairs: usize) -> Result<()> {
    let before_open = held()?;
    let context = open_device()?;
    let domain = ProtectionDomain::new(&context)?;
    let opened = held()?;
    ensure!(opened != before_open, "the counts count nothing");

    for _ in 0..registrations {
        Memory::new(&domain, 16 << 10, open())?;
    }
    ensure!(
        held()? == opened,
        "after registrations: {:?}, not {opened:?}",
        held()?
    );
    println!("{registrations} registrations: nothing left");

    for _ in 0..pairs {
        connection(&context)?;
    }
    ensure!(
        held()? == opened,
        "after connections: {:?}, not {opened:?}",
        held()?
    );
    println!("{pairs} connections: nothing left");

    drop((domain, context));
    ensure!(
        held()? == before_open,
        "in the end: {:?}, not {before_open:?}",
        held()?
    );
    println!("held in the end: {}", before_open.resources);
    Ok(())
}

fn connection(context: &Context) -> Result<()> {
    let channel = std::sync::Arc::new(CompletionChannel::new(context)?);
    let (one, two) = connected_with(context, Some(&channel), patience())?;
    let _window = MemoryWindow::new(&one.domain)?;
    two.queue.arm()?;
    Ok(())
}
