//! A hostile node's messages, executed on a replica: the fuzz target calls [`replica`] with what the fuzzer
//! finds, the tests with random bytes and with requests that are nearly right.
//!
//! All parts are those that ship: messages are decoded as connections and queue pairs decode them, the
//! [`Replica`] machine executes them on a chunk store, and only the store's disk is in memory. The input
//! chooses the messages, and in between what happens to the replica: newer maps, layers that come and go, the
//! disk's progress and its errors, restarts.
//!
//! [`replica`] returns if all is well, and panics if a message got where it must not.

mod input;
mod node;
#[cfg(test)]
mod tests;

use fabric_transport::frame::{self, Kind, Message, Stamp};
use fabric_transport::queue_pair::message::{self, Scratch, Window};
use fabric_transport::queue_pair::pair::WINDOWS_MAX;
use fabric_transport::queue_pair::slots::{HEAD_BYTES, PAYLOAD_BYTES, Slot, Slots};
use fabric_transport::reader::NOWHERE;
use fabric_transport::serving;
use fabric_transport::shape::{self, REQUEST_BYTES_MAX};
use fabric_types::block::BlockStamp;
use fabric_types::checksum::crc32c;
use fabric_types::membership::ReplicaState;
use fabric_types::wire::{MAGIC, RequestHeader, VERSION, blocks_touched, kind};
use zerocopy::IntoBytes;

use self::input::Input;
use self::node::{LAYERS, Node};

/// Steps of one input, so that each run is short.
const STEPS_MAX: usize = 96;
/// Restarts in one run: opening a store takes longer than anything else.
const RESTARTS_MAX: usize = 1;
/// Bytes of a request's header proper.
const HEADER_BYTES: usize = size_of::<RequestHeader>();
/// The slot that messages are received in.
const SLOT: Slot = Slot(0);

/// How far an input got.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reach {
    /// Requests that were decoded and handed to the replica.
    pub requests: usize,
    /// Of these, those that came as messages on a queue pair.
    pub by_queue_pair: usize,
    /// Requests that were done.
    pub done: usize,
    /// Starts of the replica after the first.
    pub restarts: usize,
}

/// Executes what the input says.
pub fn replica(data: &[u8]) -> Reach {
    let mut input = Input::new(data);
    let mut node = Node::new(u64::from(input.byte()));
    let slots = Slots::default();
    let mut reach = Reach::default();
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        match input.byte() % 32 {
            0..=17 => {
                let header = header(&mut input, &node);
                reach.requests += usize::from(by_connection(&mut node, &header, &mut input));
            }
            18..=24 => {
                reach.by_queue_pair += usize::from(by_queue_pair(&mut node, &slots, &mut input))
            }
            25 => {
                let mut header = input.bytes::<REQUEST_BYTES_MAX>().to_vec();
                header.truncate(HEADER_BYTES + 32 * usize::from(input.byte() % 2));
                header[..4].copy_from_slice(&MAGIC);
                header[4] = VERSION;
                reach.requests += usize::from(by_connection(&mut node, &header, &mut input));
            }
            26 => change_map(&mut node, &mut input),
            27 => node.set_layers(input.byte()),
            28..=29 => disturb(&mut node, &mut input),
            30 if reach.restarts < RESTARTS_MAX => {
                reach.restarts += 1;
                node.restart(input.byte());
            }
            _ => {}
        }
        node.run(usize::from(input.byte() % 8));
    }
    node.end();
    reach.requests += reach.by_queue_pair;
    reach.done = node.done;
    reach
}

/// The header of a request that is nearly right.
fn header(input: &mut Input<'_>, node: &Node) -> Vec<u8> {
    let kind = kind::READ + input.byte() % 10;
    let layer = LAYERS[usize::from(input.byte()) % LAYERS.len()];
    let stamp = size_of::<BlockStamp>() as u32;
    let (offset, len) = match kind {
        kind::READ | kind::WRITE | kind::ZERO => {
            let offset = u32::from(input.word()) % 8192 * 512;
            (offset, (1 + u32::from(input.byte()) % 40) * 512)
        }
        kind::INSPECT => {
            let block = u32::from(input.word()) % 1024;
            (block, (1 + u32::from(input.byte())) * stamp)
        }
        kind::RESTORE => {
            let block = match input.bit() {
                true => node.inspected_block(input.byte()),
                false => u32::from(input.word()) % 1024,
            };
            (block, 2 * stamp + u32::from(input.bit()) * 4096)
        }
        kind::LIST_CHUNKS | kind::FENCE | kind::TELL_FENCE => (0, u32::from(input.word()) % 2048),
        _ => (0, 0),
    };
    let crcs = match kind {
        kind::WRITE => blocks_touched(offset, len),
        _ => 0,
    };
    let fua = matches!(kind, kind::WRITE | kind::ZERO) && input.bit();
    let header = RequestHeader {
        magic: MAGIC,
        version: VERSION,
        kind,
        flags: u16::from(fua).into(),
        request: u64::from(input.byte()).into(),
        pg: input.group().0.into(),
        epoch: match input.byte() {
            255 => u64::MAX.into(),
            byte => (node.epoch() + 1 - u64::from(byte > 10) - u64::from(byte > 200)).into(),
        },
        generation: match kind {
            // Rarely a generation that was not granted.
            kind::FENCE => match input.byte() {
                250.. => 7.into(),
                byte => u64::from(byte % 4).into(),
            },
            _ => u64::from(input.byte() % 8).into(),
        },
        sequence: u64::from(input.word()).into(),
        watermark: u64::from(input.word()).into(),
        layer: layer.0.into(),
        chunk: u32::from(input.byte() % 3).into(),
        offset: offset.into(),
        len: len.into(),
        crc_count: crcs.into(),
    };
    let mut bytes = header.as_bytes().to_vec();
    if kind == kind::RESTORE {
        bytes.extend_from_slice(stamps(input, node, offset).as_bytes());
    }
    // Behind magic and version.
    for _ in 0..input.byte().saturating_sub(200) / 16 {
        let at = 5 + usize::from(input.byte()) % (bytes.len() - 5);
        bytes[at] ^= input.byte();
    }
    bytes
}

/// What a restoration expects, mostly what was told of the block, and what it brings.
fn stamps(input: &mut Input<'_>, node: &Node, block: u32) -> [BlockStamp; 2] {
    let any = BlockStamp {
        version: input.number(),
        crc: crc32c(&[input.filling(); 4096]),
        holds: u32::from(input.byte() % 4),
    };
    [node.inspected(block).unwrap_or_default(), any]
}

/// Decodes a request as a connection does, whose frame claims what the request implies; true if the replica
/// got it.
fn by_connection(node: &mut Node, header: &[u8], input: &mut Input<'_>) -> bool {
    let Ok(request) = shape::decode(header, NOWHERE) else {
        return false;
    };
    let shape = shape::of(&request.command);
    let bytes = shape.payload_len.max(shape.room) as usize;
    let memory = node.memory(bytes, input);
    let request = shape::decode(header, memory.list()).expect("it was decoded before");
    node.execute(request, memory);
    true
}

/// The same by a queue pair: a message is put into a slot, by the rules or as any bytes, and read as it is
/// received.
fn by_queue_pair(node: &mut Node, slots: &Slots, input: &mut Input<'_>) -> bool {
    let mut stamp = Stamp::new([1; 16]);
    let len = match input.byte() % 4 {
        0 => put_raw(slots, input),
        _ => put_message(node, slots, input),
    };
    // SAFETY: nobody else uses the slots.
    let Ok(received) = (unsafe { message::read(slots, SLOT, len, &mut stamp) }) else {
        return false;
    };
    let mut windows = Vec::new();
    // SAFETY: as above.
    unsafe { received.windows(slots, &mut windows) };
    let Ok(moved) = received.moved_by(&windows) else {
        return false;
    };
    // SAFETY: as above.
    let header = unsafe { received.header(slots) };
    // Memory is taken for what the frame claims, if the request says the same.
    if serving::checked(&received.head, header).is_err() {
        return false;
    }
    let head = received.head;
    let bytes = head.payload_len.max(head.room) as usize;
    assert!(moved == 0 || moved == bytes);
    let mut memory = node.memory(bytes, input);
    if received.is_inside {
        // SAFETY: as above.
        let inside = unsafe { received.inside(slots) };
        memory.fill(&inside.iter().map(|byte| byte % 2).collect::<Vec<u8>>());
    }
    let list = memory.list();
    if bytes > 0 && head.payload_len > 0 {
        // SAFETY: the memory is there.
        let list = unsafe { std::slice::from_raw_parts(list.ptr, list.len as usize) };
        // SAFETY: as above. Data that are not what was announced are refused, which is not what is looked for
        // here.
        let _ = unsafe { received.is_intact(slots, list) };
    }
    let request = shape::decode(header, list).expect("it was decoded before");
    node.execute(request, memory);
    true
}

/// Any bytes with checksums that fit; returns how many were received.
fn put_raw(slots: &Slots, input: &mut Input<'_>) -> u32 {
    let (mut stamp, mut out) = (Stamp::new([1; 16]), Vec::new());
    let len = usize::from(input.word()) % (HEAD_BYTES + PAYLOAD_BYTES);
    // Mostly short: what follows is to be reached, too.
    let len = len >> (input.byte() % 8);
    let raw = input.rest(len);
    if frame::repair(&raw, &mut stamp, &mut out).is_none() {
        out = raw;
    }
    out.truncate(HEAD_BYTES + PAYLOAD_BYTES);
    let (head, page) = out.split_at(out.len().min(HEAD_BYTES));
    let mut padded = [0; HEAD_BYTES];
    padded[..head.len()].copy_from_slice(head);
    // SAFETY: nobody else uses the slots.
    unsafe {
        slots.set_head(SLOT, &padded);
        slots.set_page(SLOT, page);
    }
    (HEAD_BYTES + page.len()) as u32
}

/// A message of the form that a queue pair carries, around a header that is nearly right.
fn put_message(node: &Node, slots: &Slots, input: &mut Input<'_>) -> u32 {
    let header = header(input, node);
    let shape = shape::decode(&header, NOWHERE).map(|request| shape::of(&request.command));
    let (mut payload_len, mut room, mut skip) = match &shape {
        Ok(shape) => (shape.payload_len, shape.room, shape.skip),
        Err(_) => (0, 0, 0),
    };
    if input.byte() > 240 {
        (payload_len, room) = (u32::from(input.word()), u32::from(input.word()));
        skip = input.word() % 4096;
    }
    let is_inside = payload_len > 0 && payload_len as usize <= PAYLOAD_BYTES && input.bit();
    let block = [input.filling(); PAYLOAD_BYTES];
    let lens = frame::block_lens(skip, payload_len);
    let crcs: Vec<u32> = lens.map(|len| crc32c(&block[..len])).collect();
    let windows = windows(input, payload_len.max(room), is_inside);
    let message = Message {
        kind: match input.byte() {
            255 => Kind::Alive,
            254 => Kind::Reply,
            _ => Kind::Request,
        },
        pair: u64::from(input.byte()),
        header: &header,
        crcs: &crcs,
        payload_len,
        room,
        skip,
    };
    let (mut stamp, mut scratch) = (Stamp::new([1; 16]), Scratch::default());
    let (at, scratch) = ((slots, SLOT), &mut scratch);
    // SAFETY: nobody else uses the slots.
    let mut page = unsafe { message::write(&message, &windows, &mut stamp, at, scratch) };
    if is_inside && page == 0 {
        // SAFETY: as above.
        unsafe { slots.set_page(SLOT, &block[..payload_len as usize]) };
        page = payload_len;
    }
    let len = HEAD_BYTES as u32 + page;
    match input.byte() {
        255 => u32::from(input.word()) % (HEAD_BYTES + PAYLOAD_BYTES) as u32,
        _ => len,
    }
}

/// Windows that are mostly of the length of the data.
fn windows(input: &mut Input<'_>, bytes: u32, is_inside: bool) -> Vec<Window> {
    let count = match input.byte() {
        255 => usize::from(input.byte()) % (WINDOWS_MAX + 1),
        _ if is_inside || bytes == 0 => 0,
        byte => 1 + usize::from(byte) % 3,
    };
    let share = bytes / (count.max(1) as u32);
    let window = |nth: usize| Window {
        address: input.number(),
        key: 7,
        len: match nth {
            0 => bytes - share * (count.max(1) as u32 - 1),
            _ => share,
        },
    };
    (0..count).map(window).collect()
}

fn change_map(node: &mut Node, input: &mut Input<'_>) {
    let state = match input.byte() % 8 {
        0 => ReplicaState::Out,
        1..=3 => ReplicaState::Syncing,
        _ => ReplicaState::InSync,
    };
    node.change_map(input.group(), state, input.bit());
}

fn disturb(node: &mut Node, input: &mut Input<'_>) {
    match input.byte() {
        0..=9 => node.fail_device(input.byte()),
        10..=99 => node.maintain(input.byte()),
        _ => node.run(usize::from(input.byte())),
    }
}
