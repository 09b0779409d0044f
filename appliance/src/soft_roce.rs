//! A soft RoCE device (rdma_rxe) on a network card: RDMA without RDMA hardware.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::machine::Machine;
use crate::process::run;
use crate::seed::Seed;

/// Makes the device that the seed asks for, unless the card has one.
///
/// # Errors
/// The kernel refuses, or there is no such card.
pub fn set_up(machine: &Machine) -> Result<()> {
    let seed = machine.seed()?.unwrap_or_default();
    let Some(card) = card(&seed, Path::new("/sys/class/net")) else {
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

/// The kernel's name of the card that the seed means: it says that name, or the one of an entry of `network`,
/// which may know the card by its hardware address. `cards` is a directory of all.
fn card(seed: &Seed, cards: &Path) -> Option<String> {
    let said = seed.penstock.as_ref()?.soft_roce.clone()?;
    let entry = seed
        .network
        .as_ref()
        .and_then(|network| network.ethernets.get(&said));
    let address = entry
        .and_then(|entry| entry.matches.as_ref())
        .and_then(|one| one.macaddress.as_ref());
    let Some(address) = address else {
        return Some(said);
    };
    let has_it = |card: &Path| {
        std::fs::read_to_string(card.join("address"))
            .is_ok_and(|text| text.trim().eq_ignore_ascii_case(address))
    };
    let found = std::fs::read_dir(cards)
        .ok()?
        .flatten()
        .find(|card| has_it(&card.path()));
    found.map(|card| card.file_name().to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_known_by_its_name_or_by_its_entry() {
        let cards = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(cards.path().join("enp0s3")).expect("made");
        std::fs::write(cards.path().join("enp0s3/address"), "52:54:00:00:00:0a\n")
            .expect("written");
        let seed = |network: &str, card: &str| {
            let text = format!("{network}\npenstock: {{init: {{}}, soft_roce: {card}}}");
            Seed::parse(&text).expect("a seed")
        };
        let by_address =
            "network: {version: 2, ethernets: {lan: {match: {macaddress: '52:54:00:00:00:0A'}}}}";
        let found = |seed: &Seed| card(seed, cards.path());
        assert_eq!(found(&seed("", "eth7")).as_deref(), Some("eth7"));
        assert_eq!(found(&seed(by_address, "lan")).as_deref(), Some("enp0s3"));
        let other = by_address.replace("0A", "0B");
        assert_eq!(found(&seed(&other, "lan")), None, "that card is not there");
        assert_eq!(found(&Seed::default()), None);
    }
}
