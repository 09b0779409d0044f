//! What comes on a lane's connections.

use super::*;

impl Lane {
    /// A connection has something to be read, or room to be written to.
    pub(super) fn serve(&mut self, index: u32, flags: EventFlags) {
        let outcome = self
            .read(index)
            .and_then(|()| match flags.contains(EventFlags::OUT) {
                true => self.flush(index),
                false => Ok(()),
            });
        if let Err(error) = outcome {
            self.lose(index, &error);
        }
    }

    pub(super) fn read(&mut self, index: u32) -> Result<(), LinkError> {
        for _ in 0..READS_MAX {
            // First what is there: it may have waited for memory.
            self.take_frames(index)?;
            let link = self.links[index].as_deref_mut().expect("it is linked");
            if link.stalled {
                return Ok(());
            }
            let more = match &mut link.end {
                End::Caller(_, caller) => {
                    let more = link.socket.receive(caller.reader())?;
                    if more {
                        caller.heard();
                    }
                    more
                }
                End::Responder(responder) => link.socket.receive(responder.reader())?,
            };
            if !more {
                return Ok(());
            }
        }
        self.take_frames(index)?;
        // Under TLS what was read from the socket tells of itself no more.
        self.inbox.eventfd.signal();
        self.again(index);
        Ok(())
    }

    /// Has a connection looked at again although its socket may have nothing.
    pub(super) fn again(&mut self, index: u32) {
        let key = self.links.key(index);
        if !self.stalled.contains(&key) {
            self.stalled.push_back(key);
        }
    }

    pub(super) fn take_frames(&mut self, index: u32) -> Result<(), LinkError> {
        loop {
            self.take_messages(index)?;
            if !self.take_pairings(index)? {
                return Ok(());
            }
        }
    }

    fn take_messages(&mut self, index: u32) -> Result<(), LinkError> {
        let link = self.links[index].as_deref_mut().expect("it is linked");
        match &mut link.end {
            End::Caller(node, caller) => {
                let node = *node;
                let mut answered = false;
                while let Some((reply, bytes)) = caller.poll()? {
                    answered = true;
                    self.counters.add(Count::TcpBytesIn, u64::from(bytes));
                    self.events.push_back(Event::Reply(node, reply));
                }
                if answered {
                    self.send_waiting(node);
                }
            }
            End::Responder(_) => self.take_requests(index)?,
        }
        Ok(())
    }

    pub(super) fn send_waiting(&mut self, node: NodeId) {
        let Some(peer) = self.peers.get_mut(&node) else {
            return;
        };
        let LinkState::Up(index) = peer.link else {
            return;
        };
        let Some(link) = self.links[index].as_deref_mut() else {
            return;
        };
        let mut sent = false;
        while let Some(next) = peer.waiting.front() {
            let (what, counters) = ((&next.shape, &next.crcs[..]), &self.counters);
            // SAFETY: the client keeps the buffers until the answer or the loss.
            let went = unsafe { link.send(&next.request, what, &mut self.pairs.bounces, counters) };
            if !went {
                break;
            }
            peer.waiting.pop_front();
            sent = true;
        }
        if sent {
            self.mark(index);
        }
    }

    pub(super) fn take_requests(&mut self, index: u32) -> Result<(), LinkError> {
        loop {
            let key = self.links.key(index);
            let link = self.links[index].as_deref_mut().expect("it is linked");
            let End::Responder(responder) = &mut link.end else {
                return Ok(());
            };
            match responder.poll()? {
                ReceivedRequest::Nothing => return Ok(()),
                ReceivedRequest::Begins(head) => {
                    let Some(slot) = self.servings.begin(key, &head, responder.header())? else {
                        link.stalled = true;
                        self.watch(index);
                        self.again(index);
                        return Ok(());
                    };
                    // SAFETY: the serving holds the list and its memory until the reply is out.
                    unsafe { responder.admit(self.servings.list(slot)) };
                    link.receiving = Some(slot);
                }
                ReceivedRequest::Complete { intact } => {
                    let slot = link.receiving.take().expect("a request was admitted");
                    let request = self.servings.complete(slot, responder.header())?;
                    let bytes = responder.reader().head().payload_len;
                    self.counters.add(Count::TcpBytesIn, u64::from(bytes));
                    responder.begun();
                    if intact {
                        self.hand_out(index, request);
                    } else {
                        self.reply(&Reply {
                            id: request.id,
                            incarnation: self.control.incarnation(),
                            result: Err(Refusal::Mismatch),
                        });
                    }
                }
            }
        }
    }

    /// Hands a request out, or refuses it if its sender may not reach what it is about.
    pub(super) fn hand_out(&mut self, index: u32, request: Request) {
        let version = self.control.members_version();
        let link = self.links[index].as_deref_mut().expect("it is linked");
        let End::Responder(responder) = &link.end else {
            unreachable!("only the answering end receives requests");
        };
        let node = responder.peer();
        if link.access.0 != version {
            link.access = (version, self.control.access(node, link.incarnation));
        }
        match link.access.1.check(&request) {
            Ok(()) => {
                let peer = PeerId(index + 1);
                self.events.push_back(Event::Request(node, peer, request));
            }
            Err(refusal) => self.reply(&Reply {
                id: request.id,
                incarnation: self.control.incarnation(),
                result: Err(refusal),
            }),
        }
    }

    /// Goes on with connections that waited for memory, or for their turn.
    pub(super) fn resume_stalled(&mut self, room: bool) {
        for _ in 0..self.stalled.len() {
            let Some(key) = self.stalled.pop_front() else {
                return;
            };
            let Some(index) = self.links.find(key) else {
                continue;
            };
            let link = self.links[index].as_deref_mut().expect("it is linked");
            if link.stalled {
                if !room {
                    self.stalled.push_back(key);
                    continue;
                }
                link.stalled = false;
                self.watch(index);
            }
            self.serve(index, EventFlags::IN);
        }
    }
}
