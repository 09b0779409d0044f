//! Our verbs on an RDMA device of Debian's kernel. Each test boots machines of its own; what they do is in
//! `guest/`, which fails there if something is not as promised, and what it prints is looked at here.

use std::path::Path;

use anyhow::{Result, ensure};
use rdma_rig::{Machine, PROGRAM_LIMIT, Switch};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rdma-scenarios");

fn machine() -> Result<Machine> {
    Machine::boot(Path::new(PROGRAM))
}

/// Runs a scenario in `machine`, and shows what it printed. What the library could not destroy is an error in
/// its log.
fn scenario(machine: &mut Machine, args: &[&str]) -> Result<String> {
    let text = machine.succeed(args)?;
    eprintln!("{args:?}:\n{text}");
    ensure!(
        !text.contains("cannot be destroyed"),
        "{args:?} left something:\n{text}"
    );
    Ok(text)
}

fn has(text: &str, expected: &str) -> Result<()> {
    ensure!(text.contains(expected), "no {expected:?} in:\n{text}");
    Ok(())
}

#[test]
fn a_host_without_devices_has_an_empty_list_and_no_error() -> Result<()> {
    let list = fabric_rdma::verbs::device::DeviceList::get()?;
    if Path::new("/sys/class/infiniband").exists() {
        ensure!(list.find("no-such-device").is_none());
        return Ok(());
    }
    ensure!(list.is_empty() && list.iter().count() == 0);
    Ok(())
}

#[test]
fn devices_ports_and_gids_are_found() -> Result<()> {
    let mut machine = machine()?;
    let text = scenario(&mut machine, &["devices"])?;
    has(&text, "devices: 1\n")?;
    has(&text, "device rxe0: ")?;
    has(&text, "windows of type 2: true")?;
    has(
        &text,
        "state: Active, mtu: Some(B1024), mtu_max: Some(B4096), link_layer: Ethernet",
    )?;
    has(
        &text,
        "0000:0000:0000:0000:0000:ffff:0a4d:0001 RoCE v2 eth0",
    )?;
    has(
        &text,
        "fe80:0000:0000:0000:5054:00ff:fe00:0001 RoCE v2 eth0",
    )?;
    machine.vm().sh("rdma link delete rxe0")?;
    let text = scenario(&mut machine, &["devices"])?;
    has(&text, "devices: 0\n")
}

#[test]
fn check_tests_a_port_and_says_what_is_wrong_and_how_to_fix_it() -> Result<()> {
    let mut machine = machine()?;
    let address = machine.address().to_string();
    for args in [&["check", &address][..], &["check"]] {
        let text = scenario(&mut machine, args)?;
        has(&text, "Warn rxe0: is software")?;
        has(
            &text,
            "Warn rxe0 port 1: has a link; packets carry 1024 bytes",
        )?;
        has(&text, "ip link set eth0 mtu 9000`), it has 1500 now")?;
        has(&text, "Ok trial of GID ")?;
        has(&text, "usable: true")?;
    }
    let text = scenario(&mut machine, &["check", "10.99.0.1"])?;
    has(
        &text,
        "Fail address 10.99.0.1: no RDMA device has the address",
    )?;
    has(&text, &address)?;
    has(&text, "usable: false")?;
    machine.vm().sh("ip link set eth0 down")?;
    let text = scenario(&mut machine, &["check"])?;
    has(&text, "Fail rxe0 port 1: has no link")?;
    has(&text, "usable: false")?;
    machine.vm().sh("rdma link delete rxe0")?;
    let text = scenario(&mut machine, &["check"])?;
    has(
        &text,
        "Fail devices: the kernel shows none [look for the card",
    )?;
    has(&text, "usable: false")
}

#[test]
fn messages_and_memory_are_carried_over() -> Result<()> {
    let mut machine = machine()?;
    for name in ["send", "read-write", "chains", "events", "no-allocation"] {
        has(&scenario(&mut machine, &[name])?, ": ok")?;
    }
    Ok(())
}

#[test]
fn a_window_opens_what_was_offered_until_it_is_invalidated() -> Result<()> {
    let mut machine = machine()?;
    let text = scenario(&mut machine, &["windows"])?;
    has(&text, "type_2b: true")?;
    has(&text, "windows: ok")?;
    has(
        &scenario(&mut machine, &["windows-dropped"])?,
        "dropped: ok",
    )
}

#[test]
fn a_peer_is_refused_what_no_window_offers_it() -> Result<()> {
    let text = scenario(&mut machine()?, &["windows-refused"])?;
    ensure!(
        text.matches("IBV_WC_REM_ACCESS_ERR peer=Error").count() == 10,
        "{text}"
    );
    has(&text, "refused: ok")
}

#[test]
fn connections_end_as_they_should() -> Result<()> {
    let mut machine = machine()?;
    let text = scenario(&mut machine, &["receiver-not-ready"])?;
    has(&text, "no receive: IBV_WC_RNR_RETRY_EXC_ERR Error")?;
    scenario(&mut machine, &["flushed"])?;
    has(
        &scenario(&mut machine, &["nobody"])?,
        "nobody: IBV_WC_RETRY_EXC_ERR",
    )?;
    let text = scenario(&mut machine, &["refused-early"])?;
    has(
        &text,
        "another opening: create a queue pair on rxe0: Invalid argument",
    )?;
    has(
        &text,
        "another domain: post work requests on rxe0: Invalid argument",
    )?;
    has(&text, "unmapped: register memory on rxe0: ")?;
    has(
        &text,
        "wrong order: change the state of a queue pair of rxe0: Invalid argument",
    )?;
    let text = scenario(&mut machine, &["pinned"])?;
    has(
        &text,
        "pinned: register memory on rxe0: Cannot allocate memory",
    )?;
    has(&text, "RLIMIT_MEMLOCK")
}

#[test]
fn a_link_that_goes_down_is_told() -> Result<()> {
    let text = scenario(&mut machine()?, &["link-down"])?;
    has(&text, "event: PortDown(PortNumber(1))")?;
    has(&text, "event: PortActive(PortNumber(1))")
}

#[test]
fn nothing_is_left_of_what_is_dropped() -> Result<()> {
    let text = scenario(&mut machine()?, &["leaks", "1000", "200"])?;
    has(&text, "1000 registrations: nothing left")?;
    has(&text, "200 connections: nothing left")
}

#[test]
fn a_fork_does_not_tear_registered_memory() -> Result<()> {
    let text = scenario(&mut machine()?, &["fork"])?;
    has(&text, "forks: Unneeded")?;
    has(&text, "after it: ok")
}

/// Two machines on a switch, of which the first serves in the background.
fn two_machines(switch: &Switch) -> Result<(Machine, Machine)> {
    // One after the other, and in this thread: a machine dies with the thread that booted it.
    let program = Path::new(PROGRAM);
    let mut one = Machine::boot_on(switch, program, 1)?;
    let two = Machine::boot_on(switch, program, 2)?;
    let listen = format!("{}:7000", one.address());
    one.start(&["serve", &listen], "serve")?;
    one.wait_for_line("serve", "listening", PROGRAM_LIMIT)?;
    Ok((one, two))
}

#[test]
fn two_machines_reach_each_other() -> Result<()> {
    let switch = Switch::new()?;
    let (mut one, mut two) = two_machines(&switch)?;
    let text = scenario(&mut two, &["ask", "10.77.0.1:7000", "all"])?;
    has(&text, "asked")?;
    let text = one.wait_for_line("serve", "served", PROGRAM_LIMIT)?;
    eprintln!("the server:\n{text}");
    Ok(())
}

#[test]
fn a_connection_whose_network_is_gone_is_given_up_in_time() -> Result<()> {
    let switch = Switch::new()?;
    let (_one, mut two) = two_machines(&switch)?;
    two.start(&["ask", "10.77.0.1:7000", "plug"], "ask")?;
    two.wait_for_line("ask", "read", PROGRAM_LIMIT)?;
    switch.pull_plug();
    two.vm().sh("touch /run/go")?;
    let text = two.wait_for_line("ask", "given up", PROGRAM_LIMIT)?;
    eprintln!("{text}");
    has(&text, "without network: IBV_WC_RETRY_EXC_ERR")
}

#[test]
fn forged_or_stale_key_is_refused_and_requests_go_on() -> Result<()> {
    let mut machine = machine()?;
    let address = machine.address().to_string();
    let text = scenario(&mut machine, &["forgery", &address])?;
    has(&text, "refused, and nothing lost: ok")
}

#[test]
fn data_goes_by_queue_pair_uncopied_and_by_tcp_without_the_link() -> Result<()> {
    let mut machine = machine()?;
    let address = machine.address().to_string();
    let text = scenario(&mut machine, &["lanes", &address])?;
    has(&text, "one message each way, no copy, no allocation: ok")?;
    has(&text, "memory that is not registered: ")?;
    has(&text, "link up: RDMA again")
}
