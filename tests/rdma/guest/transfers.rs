//! Messages, READs and WRITEs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use fabric_rdma::verbs::completion::{Completion, CompletionChannel, CompletionQueue};
use fabric_rdma::verbs::memory::Access;
use fabric_rdma::verbs::post::{Payload, ReceiveChain, SendFlags, Work};
use fabric_rdma::verbs::status::{Done, Status};
use fabric_rdma::verbs::window::MemoryWindow;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::allocations;
use super::kit::{Memory, connected, connected_with, open, open_device, patience, pattern};

const LARGE_BYTES: usize = 1 << 20;
const MESSAGES: u64 = 32;
const MESSAGE_BYTES: usize = 256;

/// Messages arrive whole, with bytes of their own and from memory, with and without a number.
pub fn send() -> Result<()> {
    let context = open_device()?;
    let (one, two) = connected(&context)?;
    let from = Memory::new(&one.domain, 4096, open())?;
    let to = Memory::new(&two.domain, 4096, open())?;
    from.put(0, &pattern(4096, 7));

    let mut receives = ReceiveChain::new(4, 2);
    let quarter = |index: usize| to.region().segment(index * 1024..(index + 1) * 1024);
    for index in 0..3 {
        let segment = quarter(index).context("within the region")?;
        receives.push(index as u64, &[segment])?;
    }
    // Into two places.
    let both = [
        to.region().segment(3072..3082),
        to.region().segment(3584..4096),
    ];
    receives.push(3, &both.map(|part| part.expect("within the region")))?;
    two.pair.post_receives(&mut receives)?;

    let inline = b"bytes of its own";
    let ended = one.carry_out(Work::Send, Payload::Inline(inline))?;
    ensure!(ended.done == Some(Done::Send), "{ended:?}");
    let segment = from.region().segment(100..1000).context("within")?;
    one.carry_out(Work::Send, Payload::Segments(&[segment]))?;
    one.carry_out(Work::SendWithImmediate(0x1234_5678), Payload::NONE)?;
    let parts = [from.region().segment(0..6), from.region().segment(10..20)];
    let parts = parts.map(|part| part.expect("within the region"));
    one.carry_out(Work::Send, Payload::Segments(&parts))?;

    let arrived = two.wait(4)?;
    let ids: Vec<u64> = arrived.iter().map(|ended| ended.id).collect();
    ensure!(ids == [0, 1, 2, 3], "order of arrival: {ids:?}");
    ensure!(
        arrived
            .iter()
            .all(|ended| ended.done == Some(Done::Receive)),
        "{arrived:?}"
    );
    let bytes: Vec<u32> = arrived.iter().map(|ended| ended.bytes).collect();
    ensure!(bytes == [16, 900, 0, 16], "bytes: {bytes:?}");
    ensure!(
        arrived[2].immediate == Some(0x1234_5678),
        "{:?}",
        arrived[2]
    );
    ensure!(arrived[1].immediate.is_none(), "{:?}", arrived[1]);
    ensure!(to.get(0, 16) == inline, "bytes of its own differ");
    ensure!(
        to.get(1024, 900) == from.get(100, 900),
        "bytes from memory differ"
    );
    let joined = [from.get(0, 6), from.get(10, 10)].concat();
    ensure!(
        [to.get(3072, 10), to.get(3584, 6)].concat() == joined,
        "parts differ"
    );
    println!("messages: ok");
    Ok(())
}

/// A large buffer is written to the peer and read back, at odd places.
pub fn read_and_write() -> Result<()> {
    let context = open_device()?;
    let (one, two) = connected(&context)?;
    let ours = Memory::new(&one.domain, 2 * LARGE_BYTES + 64, open())?;
    let theirs = Memory::new(&two.domain, LARGE_BYTES + 64, open())?;
    let data = pattern(LARGE_BYTES, 3);
    ours.put(5, &data);

    let place = theirs.place(17, theirs.region().remote_key());
    let from = ours
        .region()
        .segment(5..5 + LARGE_BYTES)
        .context("within")?;
    let written = one.carry_out(Work::Write(place), Payload::Segments(&[from]))?;
    ensure!(written.done == Some(Done::Write), "{written:?}");
    ensure!(
        theirs.get(17, LARGE_BYTES) == data,
        "what was written differs"
    );
    ensure!(theirs.get(0, 17) == [0; 17], "bytes before it were written");
    ensure!(
        theirs.get(17 + LARGE_BYTES, 47) == [0; 47],
        "bytes behind it were written"
    );

    theirs.put(17, &pattern(LARGE_BYTES, 4));
    let start = LARGE_BYTES + 21;
    let to = ours
        .region()
        .segment(start..start + LARGE_BYTES)
        .context("within")?;
    let read = one.carry_out(Work::Read(place), Payload::Segments(&[to]))?;
    ensure!(read.done == Some(Done::Read), "{read:?}");
    ensure!(
        ours.get(start, LARGE_BYTES) == pattern(LARGE_BYTES, 4),
        "what was read differs"
    );
    ensure!(
        ours.get(5, LARGE_BYTES) == data,
        "our other half was touched"
    );
    ensure!(two.poll()?.is_empty(), "the peer was told of it");
    println!("1 MiB written and read: ok");
    Ok(())
}

/// Work requests that are posted together and of which only the last tells of its end.
pub fn chains() -> Result<()> {
    let context = open_device()?;
    let (one, two) = connected(&context)?;
    let bytes = MESSAGES as usize * MESSAGE_BYTES;
    let from = Memory::new(&one.domain, bytes, open())?;
    let to = Memory::new(&two.domain, bytes, open())?;
    from.put(0, &pattern(bytes, 11));
    let range = |id: u64| id as usize * MESSAGE_BYTES..(id as usize + 1) * MESSAGE_BYTES;

    let mut receives = ReceiveChain::new(MESSAGES as usize, 1);
    let mut chain = one.pair.send_chain(MESSAGES as usize);
    // More rounds than the queue has room for: what is not told of makes room when a later one is.
    for round in 0..8u32 {
        from.put(0, &pattern(bytes, round));
        for id in 0..MESSAGES {
            let into = to.region().segment(range(id)).context("within")?;
            receives.push(id, &[into])?;
            let part = from.region().segment(range(id)).context("within")?;
            let flags = SendFlags {
                signalled: id + 1 == MESSAGES,
                fenced: false,
            };
            chain.push(id, Work::Send, Payload::Segments(&[part]), flags)?;
        }
        two.pair.post_receives(&mut receives)?;
        one.pair.post(&mut chain)?;
        ensure!(
            chain.is_empty() && receives.is_empty(),
            "posting empties chains"
        );
        let told = one.wait_one()?;
        ensure!(
            (told.id, told.status) == (MESSAGES - 1, Status::Success),
            "{told:?}"
        );
        let arrived = two.wait(MESSAGES as usize)?;
        let ids: Vec<u64> = arrived.iter().map(|ended| ended.id).collect();
        ensure!(ids == (0..MESSAGES).collect::<Vec<_>>(), "order: {ids:?}");
        ensure!(
            to.get(0, bytes) == pattern(bytes, round),
            "round {round} differs"
        );
    }
    println!("8 chains of {MESSAGES}: ok");
    Ok(())
}

/// Chains are filled, posted and completed without an allocation of ours, windows bound among them.
pub fn no_allocation() -> Result<()> {
    let context = open_device()?;
    let (one, two) = connected(&context)?;
    let memory = Memory::new(&one.domain, 4096, open())?;
    let part = [memory.region().segment(0..64).context("within")?];
    let mut window = MemoryWindow::new(&one.domain)?;
    let mut receives = ReceiveChain::new(1, 0);
    let mut chain = one.pair.send_chain(2);
    let mut room = Completion::room::<8>();
    let before = allocations();
    for round in 0..100 {
        receives.push(round, &[])?;
        two.pair.post_receives(&mut receives)?;
        let bind = window.bind(round, memory.region(), 0..64, Access::REMOTE_READ)?;
        chain.push(1, Work::Send, Payload::NONE, SendFlags::SILENT)?;
        let write = Work::Write(memory.place(0, bind.key()));
        one.pair.post_bound(&mut [bind], &mut chain)?;
        until_one(&two.queue, &mut room)?;
        chain.push(
            2,
            Work::LocalInvalidate(window.key()),
            Payload::NONE,
            SendFlags::SIGNALLED,
        )?;
        one.pair.post(&mut chain)?;
        until_one(&one.queue, &mut room)?;
        // SAFETY: its end was waited for.
        unsafe { window.invalidated() };
        ensure!(
            chain
                .push(3, write, Payload::Segments(&part), SendFlags::SILENT)
                .is_ok()
        );
        chain.clear();
    }
    let made = allocations() - before;
    ensure!(made == 0, "{made} allocations");
    println!("100 rounds without an allocation: ok");
    Ok(())
}

fn until_one(queue: &CompletionQueue, room: &mut [Completion]) -> Result<()> {
    let start = Instant::now();
    while queue.poll(room)? == 0 {
        ensure!(start.elapsed() < Duration::from_secs(60), "nothing ends");
    }
    ensure!(room[0].status() == Status::Success, "{:?}", room[0]);
    Ok(())
}

/// Sleeping until a completion arrives, with more events than are acknowledged together.
pub fn events() -> Result<()> {
    let context = open_device()?;
    let channel = Arc::new(CompletionChannel::new(&context)?);
    let (one, two) = connected_with(&context, Some(&channel), patience())?;
    let to = Memory::new(&two.domain, 4096, open())?;
    ensure!(
        channel.next_event()?.is_none(),
        "an event before anything happened"
    );
    let mut receives = ReceiveChain::new(1, 1);
    for round in 0..200u64 {
        let into = to.region().segment(0..64).context("within")?;
        receives.push(round, &[into])?;
        two.pair.post_receives(&mut receives)?;
        two.queue.arm()?;
        ensure!(
            two.poll()?.is_empty(),
            "a completion before anything happened"
        );
        // The other end is not armed, so only the receiver's event comes.
        let told = one.carry_out(Work::Send, Payload::Inline(&round.to_le_bytes()))?;
        ensure!(told.status == Status::Success, "{told:?}");
        let mut wait = [PollFd::from_borrowed_fd(channel.fd(), PollFlags::IN)];
        let limit = Timespec {
            tv_sec: 30,
            tv_nsec: 0,
        };
        ensure!(
            poll(&mut wait, Some(&limit))? == 1,
            "no event in round {round}"
        );
        ensure!(channel.next_event()? == Some(2), "the wrong queue's event");
        ensure!(
            channel.next_event()?.is_none(),
            "one completion, two events"
        );
        let arrived = two.wait_one()?;
        ensure!(arrived.id == round, "{arrived:?}");
        ensure!(to.get(0, 8) == round.to_le_bytes(), "round {round} differs");
    }
    println!("200 events: ok");
    Ok(())
}
