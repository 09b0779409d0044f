//! The short way: one piece, one replica, answered by the call that sends it. No slot is taken and nothing
//! copied.

use super::ios::NONE;
use super::{Client, Transport, changes_data};
use crate::core::volume::{Finished, VolumeState};
use crate::io::{self, Op};
use crate::proto::ids::CHUNK_BYTES;
use crate::proto::{Command, Request, RequestId, Sequence};
use crate::store::device::IoVecs;

impl Client {
    /// Executes a request if it can be done so; false if it has to go the long way: it does not fit this one,
    /// or was refused, and the long way knows what to do then (it asks again, under another version).
    #[inline]
    pub(super) fn in_place<T: Transport>(
        &mut self,
        volume: &VolumeState,
        request: &io::Request<'_>,
        transport: &mut T,
    ) -> bool {
        let [group] = self.groups.as_slice() else {
            return false;
        };
        let Some(member) = group.set.sole() else {
            return false;
        };
        let fits = request.offset % CHUNK_BYTES + request.len <= CHUNK_BYTES;
        let bytes: u64 = request.buffers.iter().map(|b| b.iov_len as u64).sum();
        if !fits || bytes != request.len {
            return false;
        }
        let Some(command) = command_of(volume, request) else {
            return false;
        };
        let mutates = changes_data(request.op);
        let idle = self.local(volume.slot()).oldest == NONE;
        let (generation, sequence) = if mutates {
            let Some(version) = volume.watermark.draw(self.lane, idle) else {
                return false;
            };
            version.parts()
        } else {
            (volume.generation(), Sequence(0))
        };
        let (marked, watermark) = volume.watermark.resolved().parts();
        let reply = transport.send(
            member.node,
            &Request {
                // Nobody is told this name: the answer is the return value.
                id: RequestId(u64::MAX),
                pg: group.set.pg(),
                epoch: volume.epoch().max(group.set.epoch()),
                generation,
                sequence,
                watermark: if marked == generation {
                    watermark
                } else {
                    Sequence(0)
                },
                command,
            },
        );
        if mutates && idle {
            volume.watermark.set_oldest(self.lane, None);
        }
        let done = reply.is_some_and(|r| r.result.is_ok() && r.incarnation == member.incarnation);
        if done {
            let finished = match request.op {
                Op::Read => Finished::Read(request.len),
                _ => Finished::Write(request.len),
            };
            volume.count(self.lane, finished);
        }
        done
    }
}

#[inline]
fn command_of(volume: &VolumeState, request: &io::Request<'_>) -> Option<Command> {
    let chunk = volume.chunk_at(request.offset)?;
    let offset = (request.offset % CHUNK_BYTES) as u32;
    let len = request.len as u32;
    let buffers = IoVecs {
        ptr: request.buffers.as_ptr(),
        len: request.buffers.len() as u32,
    };
    match request.op {
        Op::Read => Some(Command::Read {
            chunk,
            offset,
            buffers,
            len,
        }),
        Op::Write { fua } => {
            let fua = fua || volume.durable_writes();
            Some(Command::Write {
                chunk,
                offset,
                buffers,
                len,
                fua,
            })
        }
        Op::Flush | Op::Discard | Op::WriteZeroes { .. } => None,
    }
}
