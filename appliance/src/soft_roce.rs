//! A soft RoCE device (rdma_rxe) on a network card: RDMA without RDMA hardware.

use std::process::Command;

use anyhow::{Context, Result};

use crate::machine::Machine;
use crate::process::run;

/// Makes the device that the seed asks for, unless the card has one.
///
/// # Errors
/// The kernel refuses, or there is no such card.
pub fn set_up(machine: &Machine) -> Result<()> {
    let Some(card) = machine
        .seed()?
        .and_then(|seed| seed.penstock)
        .and_then(|node| node.soft_roce)
    else {
        return Ok(());
    };
    run(Command::new("modprobe").arg("rdma_rxe"))?;
    let links = run(Command::new("rdma").args(["link", "show"]))?;
    if links
        .lines()
        .any(|line| line.split_whitespace().any(|word| word == card))
    {
        return Ok(());
    }
    run(Command::new("rdma").args(["link", "add", "rxe0", "type", "rxe", "netdev", &card]))
        .with_context(|| format!("penstock.soft_roce: give the card {card} a soft RoCE device"))?;
    Ok(())
}
