//! A fork does not tear registered memory.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use fabric_rdma::verbs::fork::fork_safety;
use fabric_rdma::verbs::post::{Payload, Work};
use fabric_rdma::verbs::status::Status;

use super::kit::{End, Memory, connected, open, open_device, pattern};

const BYTES: usize = 64 << 10;

/// What we write after a fork is what the device sends, and what the device writes is what we see, while the
/// child is there and when it has become another program.
pub fn memory_stays_whole() -> Result<()> {
    let context = open_device()?;
    println!("forks: {:?}", fork_safety());
    let (one, two) = connected(&context)?;
    let ours = Memory::new(&one.domain, BYTES, open())?;
    let theirs = Memory::new(&two.domain, BYTES, open())?;
    ours.put(0, &pattern(BYTES, 1));
    theirs.put(0, &pattern(BYTES, 2));
    there_and_back(&one, &ours, &theirs, 3)?;

    let (mut go, wait) = {
        let (read, write) = rustix::pipe::pipe()?;
        (Some(write), read)
    };
    // SAFETY: the child calls only what is async-signal-safe.
    let child = unsafe { libc::fork() };
    ensure!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        drop(go.take());
        become_another_program(&wait);
    }
    for round in 4..8 {
        there_and_back(&one, &ours, &theirs, round)?;
    }
    println!("while the child is there: ok");
    drop(go.take());
    let mut status = 0;
    // SAFETY: waits for a child of ours; the status is ours.
    let reaped = unsafe { libc::waitpid(child, &mut status, 0) };
    ensure!(
        reaped == child && status == 0,
        "the child: {reaped} {status}"
    );
    for round in 8..12 {
        there_and_back(&one, &ours, &theirs, round)?;
        let ended = Command::new("/bin/busybox")
            .arg("true")
            .status()
            .context("run true")?;
        ensure!(ended.success(), "{ended}");
    }
    println!("after it: ok");
    Ok(())
}

/// Waits for the parent, and executes a program.
fn become_another_program(wait: &std::os::fd::OwnedFd) -> ! {
    use std::os::fd::AsRawFd;
    let mut byte = 0u8;
    let args = [c"busybox".as_ptr(), c"true".as_ptr(), std::ptr::null()];
    // SAFETY: all of these are async-signal-safe, and their arguments lie on the stack or are constants.
    unsafe {
        libc::read(wait.as_raw_fd(), (&raw mut byte).cast(), 1);
        libc::execv(c"/bin/busybox".as_ptr(), args.as_ptr());
        libc::_exit(1)
    }
}

/// We write into our memory, the device carries it over; it changes there, and the device carries it back.
fn there_and_back(one: &End, ours: &Memory, theirs: &Memory, seed: u32) -> Result<()> {
    let all = ours.region().segment(0..BYTES).context("within")?;
    let place = theirs.place(0, theirs.region().remote_key());
    let data = pattern(BYTES, seed);
    ours.put(0, &data);
    let ended = one.carry_out(Work::Write(place), Payload::Segments(&[all]))?;
    ensure!(ended.status == Status::Success, "{ended:?}");
    ensure!(
        theirs.get(0, BYTES) == data,
        "round {seed}: the device sent something else"
    );

    let data = pattern(BYTES, seed + 1000);
    theirs.put(0, &data);
    let ended = one.carry_out(Work::Read(place), Payload::Segments(&[all]))?;
    ensure!(ended.status == Status::Success, "{ended:?}");
    ensure!(
        ours.get(0, BYTES) == data,
        "round {seed}: what the device brought is not there"
    );
    Ok(())
}
