//! Segments, and the space of theirs that nothing names any more.
//!
//! Every address of a segment below its written length is in exactly one state: not named yet (a gap, while
//! the segment is open), named by one extent or more, freed, or given back. Commits come in any order, so an
//! open segment keeps its gaps; a commit must fall into a gap or behind the end, and so no address is named
//! twice by mistake, nor after it was freed.
//!
//! **Shared data.** Copying lets several extents name an address. The table of shared runs counts, for each
//! such address, the extents besides one. An extent that lets go of an address takes one from that count; if
//! the address is in no run, the extent was the last and the address is freed. Runs are split where a part
//! of one is shared once more or let go of, and never overlap. So the count is right for each address on its
//! own, whatever part of which extent is overwritten.

use records::ReadError;

use crate::STEP_MAX;
use crate::error::{Error, Failure};
use crate::extents::BLOCK;
use crate::ids::SegmentId;
use crate::keys::{FREED, SEGMENTS, SESSIONS, SHARED, number_at};
use crate::operation::Outcome;
use crate::record::{Segment, SegmentState, Shared};
use crate::update::Update;

/// Segments that a session writes at once. A further one is refused with EMFILE.
pub const OPEN_SEGMENTS_MAX: usize = 16;

/// Bytes of a segment. A commit behind it is refused with EINVAL.
pub const SEGMENT_LENGTH_MAX: u64 = 1 << 40;

/// Gaps of an open segment. A commit that would leave more is refused with ENOBUFS: the session names what
/// it skipped, or seals the segment and writes another one.
pub const GAPS_MAX: usize = 256;

pub(crate) fn new(update: &mut Update<'_, '_>) -> Result<Outcome, Failure> {
    let owner = update.session;
    let mut session = update.get(&SESSIONS, &owner)?.ok_or(Error::Stale)?;
    if session.open_segments.len() >= OPEN_SEGMENTS_MAX {
        return Err(Error::TooManyOpen.into());
    }
    let id = SegmentId(update.totals.next_segment);
    update.totals.next_segment += 1;
    session.open_segments.push(id);
    let segment = Segment {
        session: owner,
        state: SegmentState::Open(Vec::new()),
        written: 0,
        live: 0,
    };
    update.put(&SESSIONS, &owner, &session);
    update.put(&SEGMENTS, &id, &segment);
    Ok(Outcome::Segment(id))
}

/// Names a range of a segment that the session writes, for the first time.
pub(crate) fn claim(
    update: &mut Update<'_, '_>,
    id: SegmentId,
    (address, length): (u64, u64),
) -> Result<(), Failure> {
    let mut segment = update.get(&SEGMENTS, &id)?.ok_or(Error::Invalid)?;
    let end = address.checked_add(length).ok_or(Error::Invalid)?;
    let is_own = segment.session == update.session;
    if address % BLOCK != 0 || end > SEGMENT_LENGTH_MAX || !is_own {
        return Err(Error::Invalid.into());
    }
    let SegmentState::Open(gaps) = &mut segment.state else {
        return Err(Error::Invalid.into());
    };
    if address >= segment.written {
        if address > segment.written {
            gaps.push((segment.written, address));
        }
        segment.written = end;
    } else {
        let is_around = |(from, to): &(u64, u64)| *from <= address && end <= *to;
        let position = gaps.iter().position(is_around).ok_or(Error::Invalid)?;
        let (from, to) = gaps[position];
        let left = [(from, address), (end, to)];
        gaps.splice(
            position..=position,
            left.into_iter().filter(|(from, to)| from < to),
        );
    }
    if gaps.len() > GAPS_MAX {
        return Err(Error::TooManyGaps.into());
    }
    segment.live += length;
    update.statistics().named_bytes += length;
    update.put(&SEGMENTS, &id, &segment);
    Ok(())
}

/// The shared runs that reach into a range, by address.
fn shared_in(
    update: &Update<'_, '_>,
    segment: SegmentId,
    (from, to): (u64, u64),
) -> Result<Vec<(u64, Shared)>, ReadError> {
    let (mut found, mut first) = (Vec::new(), from);
    let (view, filesystem) = (update.view(), update.filesystem);
    let start = (segment, from);
    SHARED.scan_back(view, filesystem, &segment, &start, &mut |key, run| {
        let address = number_at(key, 8)?;
        if address + run.length > from {
            first = address;
        }
        Ok(false)
    })?;
    let start = (segment, first);
    SHARED.scan(view, filesystem, &segment, &start, &mut |key, run| {
        let address = number_at(key, 8)?;
        if address < to {
            found.push((address, run));
        }
        Ok(address < to)
    })?;
    Ok(found)
}

/// Gives each address of a range its new count of extents besides one, by its old one; nothing for an
/// address that is not shared. How many runs there were.
fn recount(
    update: &mut Update<'_, '_>,
    segment: SegmentId,
    (from, to): (u64, u64),
    count: impl Fn(u32) -> Result<u32, Error>,
    mut not_shared: impl FnMut(&mut Update<'_, '_>, u64, u64) -> Result<(), Failure>,
) -> Result<usize, Failure> {
    let runs = shared_in(update, segment, (from, to))?;
    let mut at = from;
    for (begin, run) in &runs {
        let end = begin + run.length;
        let (cut_from, cut_to) = ((*begin).max(from), end.min(to));
        if at < cut_from {
            not_shared(update, at, cut_from)?;
        }
        update.delete(&SHARED, &(segment, *begin));
        let parts = [
            (*begin, cut_from, run.others),
            (cut_from, cut_to, count(run.others)?),
            (cut_to, end, run.others),
        ];
        for (from, to, others) in parts {
            if from < to && others > 0 {
                let length = to - from;
                update.put(&SHARED, &(segment, from), &Shared { length, others });
            }
        }
        at = cut_to;
    }
    if at < to {
        not_shared(update, at, to)?;
    }
    Ok(runs.len())
}

/// One more extent names a range that is named. How many shared runs there are in it now.
pub(crate) fn share(
    update: &mut Update<'_, '_>,
    segment: SegmentId,
    (address, length): (u64, u64),
) -> Result<usize, Failure> {
    let range = (address, address + length);
    let more = |others: u32| others.checked_add(1).ok_or(Error::TooManyLinks);
    let mut added = 0;
    let runs = recount(update, segment, range, more, |update, from, to| {
        added += 1;
        let run = Shared {
            length: to - from,
            others: 1,
        };
        update.put(&SHARED, &(segment, from), &run);
        Ok(())
    })?;
    Ok(runs + added)
}

/// An extent no longer names a range. How many records of space that took.
pub(crate) fn release(
    update: &mut Update<'_, '_>,
    segment: SegmentId,
    (address, length): (u64, u64),
) -> Result<usize, Failure> {
    let range = (address, address + length);
    let mut freed = 0;
    let less = |others: u32| Ok(others - 1);
    let runs = recount(update, segment, range, less, |update, from, to| {
        freed += to - from;
        free(update, segment, (from, to));
        Ok(())
    })?;
    if freed > 0 {
        let mut record = update.get(&SEGMENTS, &segment)?.ok_or_else(|| {
            let key = SEGMENTS.key(update.filesystem, &segment);
            ReadError::new(&key, "an extent names it, and it is not there")
        })?;
        record.live -= freed;
        update.statistics().named_bytes -= freed;
        update.put(&SEGMENTS, &segment, &record);
    }
    Ok(runs + 1)
}

/// Notes a range that is to be given back.
fn free(update: &mut Update<'_, '_>, segment: SegmentId, (from, to): (u64, u64)) {
    update.put(&FREED, &(segment, from), &(to - from));
    update.statistics().freed_bytes += to - from;
}

pub(crate) fn seal(
    update: &mut Update<'_, '_>,
    id: SegmentId,
    length: u64,
) -> Result<Outcome, Failure> {
    let owner = update.session;
    let segment = update.get(&SEGMENTS, &id)?.ok_or(Error::Invalid)?;
    let is_open = matches!(segment.state, SegmentState::Open(_));
    let is_length = length % BLOCK == 0 && length >= segment.written;
    if segment.session != owner || !is_open || !is_length || length > SEGMENT_LENGTH_MAX {
        return Err(Error::Invalid.into());
    }
    let mut session = update.get(&SESSIONS, &owner)?.ok_or(Error::Stale)?;
    session.open_segments.retain(|open| *open != id);
    update.put(&SESSIONS, &owner, &session);
    close(update, id, segment, length);
    Ok(Outcome::Done)
}

/// Seals a segment whose session ended. What was written behind the last named byte is not known: whoever
/// gives space back removes everything behind the written length. How many records that took.
pub(crate) fn seal_as_written(
    update: &mut Update<'_, '_>,
    id: SegmentId,
) -> Result<usize, Failure> {
    let Some(segment) = update.get(&SEGMENTS, &id)? else {
        return Ok(0);
    };
    let length = segment.written;
    Ok(close(update, id, segment, length))
}

/// Seals a segment and frees its gaps. How many records that took.
fn close(update: &mut Update<'_, '_>, id: SegmentId, mut segment: Segment, length: u64) -> usize {
    let mut spent = 1;
    let state = std::mem::replace(&mut segment.state, SegmentState::Sealed);
    if let SegmentState::Open(mut gaps) = state {
        if length > segment.written {
            gaps.push((segment.written, length));
        }
        spent += gaps.len();
        for gap in gaps {
            free(update, id, gap);
        }
    }
    segment.written = length;
    update.put(&SEGMENTS, &id, &segment);
    spent
}

/// Forgets a freed range that was given back. A segment that is written is refused with EBUSY: nothing but
/// its session's writes may reach it.
pub(crate) fn reclaimed(
    update: &mut Update<'_, '_>,
    segment: SegmentId,
    address: u64,
    length: u64,
) -> Result<Outcome, Failure> {
    match update.get(&SEGMENTS, &segment)? {
        // Forgotten, with what was freed in it.
        None => return Ok(Outcome::Done),
        Some(record) if record.state == SegmentState::Sealed => {}
        Some(_) => return Err(Error::Busy.into()),
    }
    match update.get(&FREED, &(segment, address))? {
        None => {}
        Some(freed) if freed == length => {
            update.delete(&FREED, &(segment, address));
            update.statistics().freed_bytes -= length;
        }
        Some(_) => return Err(Error::Invalid.into()),
    }
    Ok(Outcome::Done)
}

pub(crate) fn forget(update: &mut Update<'_, '_>, id: SegmentId) -> Result<Outcome, Failure> {
    match update.get(&SEGMENTS, &id)? {
        None => return Ok(Outcome::Step { done: true }),
        Some(segment) if segment.state == SegmentState::Sealed && segment.live == 0 => {}
        Some(_) => return Err(Error::Busy.into()),
    }
    let mut freed = Vec::new();
    let filesystem = update.filesystem;
    FREED.scan(update.view(), filesystem, &id, &id, &mut |key, length| {
        freed.push((number_at(key, 8)?, length));
        Ok(freed.len() <= STEP_MAX)
    })?;
    for (address, length) in freed.iter().take(STEP_MAX) {
        update.delete(&FREED, &(id, *address));
        update.statistics().freed_bytes -= length;
    }
    let done = freed.len() <= STEP_MAX;
    if done {
        update.delete(&SEGMENTS, &id);
    }
    Ok(Outcome::Step { done })
}
