//! How connections come to a lane, and how they leave it.

use super::*;

impl Lane {
    pub(super) fn open_mail(&mut self) {
        for letter in self.mail.open() {
            match letter {
                Letter::Connected(node, fd, established) => self.connected(node, fd, *established),
                Letter::Accepted(fd, established) => {
                    let responder = Responder::new(&established.agreed);
                    let answerer = Answerer::new(&established);
                    match self.link(fd, *established, End::Responder(responder)) {
                        Some(index) => {
                            let link = self.links[index].as_deref_mut().expect("linked just now");
                            link.answerer = Some(answerer);
                            self.serve(index, EventFlags::IN);
                        }
                        None => {
                            self.mail.served.fetch_sub(1, Ordering::AcqRel);
                        }
                    }
                }
                Letter::Unreachable(node) => self.unreachable(node, Road::Down),
                Letter::Unknown(node) => self.unreachable(node, Road::None),
            }
        }
    }

    pub(super) fn connected(&mut self, node: NodeId, fd: OwnedFd, established: Established) {
        let caller = Caller::new(&established.agreed);
        let Some(peer) = self.peers.get(&node) else {
            return;
        };
        let asker = Asker::new(&established, self.control.pairs(), peer.pause);
        if let Road::Up(_) = peer.road {
            return;
        }
        match self.link(fd, established, End::Caller(node, caller)) {
            Some(index) => {
                self.peers.get_mut(&node).expect("looked up above").road = Road::Up(index);
                let link = self.links[index].as_deref_mut().expect("linked just now");
                let reason = match asker {
                    Ok(asker) => {
                        link.asker = Some(asker);
                        let peer = self.peers.get_mut(&node).expect("looked up above");
                        let failed = peer.why_not.take();
                        failed.unwrap_or_else(|| "no queue pair has proven itself yet".to_owned())
                    }
                    Err(reason) => reason,
                };
                self.tell_way(node, Err(reason));
                self.offer(index);
                self.send_waiting(node);
                self.serve(index, EventFlags::IN);
            }
            None => self.unreachable(node, Road::None),
        }
    }

    pub(super) fn unreachable(&mut self, node: NodeId, road: Road) {
        if let Some(peer) = self.peers.get_mut(&node) {
            if let Road::Up(_) = peer.road {
                return;
            }
            peer.road = road;
            if !peer.waiting.is_empty() {
                peer.waiting.clear();
                self.events.push_back(Event::Lost(node));
            }
        }
    }

    /// Takes a connection up; `None`: there is no room for it, and it is closed. Whoever owns its end is then ready to lose it, and
    /// [serves](Self::serve) it once: what came along with the handshake tells of itself no more.
    pub(super) fn link(
        &mut self,
        fd: OwnedFd,
        established: Established,
        mut end: End,
    ) -> Option<u32> {
        let index = self.links.take()?;
        let Established { session, rest, .. } = established;
        let plain = session.is_none();
        if plain {
            match &mut end {
                End::Caller(_, caller) => caller.reader().push(&rest),
                End::Responder(responder) => responder.reader().push(&rest),
            }
        }
        let socket = Socket::new(fd, session, if plain { &[] } else { &rest });
        let data = EventData::new_u64(self.links.key(index).0);
        if let Err(error) = epoll::add(&self.epoll, socket.fd(), data, EventFlags::IN) {
            tracing::error!(%error, "cannot watch a connection");
            self.links.give_back(index);
            return None;
        }
        if self.links.taken() == 1 {
            self.set_timer(TICK_MS);
        }
        self.links[index] = Some(Box::new(Link {
            asker: None,
            answerer: None,
            socket,
            end,
            receiving: None,
            stalled: false,
            dirty: false,
            blocked: false,
        }));
        Some(index)
    }

    pub(super) fn set_timer(&self, every_ms: i64) {
        let every = Timespec {
            tv_sec: 0,
            tv_nsec: every_ms * 1_000_000,
        };
        let spec = Itimerspec {
            it_interval: every,
            it_value: every,
        };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec) {
            tracing::error!(%error, "cannot set a timer; lost peers will not be noticed");
        }
    }

    /// A connection is over.
    pub(super) fn lose(&mut self, index: u32, error: &LinkError) {
        let Some(mut link) = self.links[index].take() else {
            return;
        };
        self.links.give_back(index);
        self.paired.retain(|paired| *paired != index);
        // No device works on anybody's memory when the loss is told.
        let asker = link.asker.take();
        let pause = asker.map(|asker| asker.end(&mut self.bounces));
        let answerer = link.answerer.take();
        if self.links.taken() == 0 {
            self.set_timer(0);
        }
        let receiving = link.receiving;
        match link.end {
            End::Caller(node, caller) => {
                let peer = self.peers.get_mut(&node).expect("a caller has a peer");
                if let Some(pause) = pause {
                    peer.pause = pause;
                    let way = self.control.ways.forget(self.index, node);
                    peer.why_not = way.and_then(Result::err);
                }
                let idle = caller.in_flight() == 0 && peer.waiting.is_empty();
                drop(caller);
                if idle {
                    tracing::debug!(%node, %error, "connection closed");
                    peer.road = Road::None;
                    return;
                }
                tracing::warn!(%node, %error, "connection lost with requests in flight");
                peer.road = Road::Down;
                peer.waiting.clear();
                self.events.push_back(Event::Lost(node));
                // Found while sending, it would else be told only with the next thing that comes.
                self.mail.bell.ring();
                self.control.wish(Wish::Dial {
                    lane: self.index,
                    node,
                    failed: true,
                });
            }
            End::Responder(responder) => {
                tracing::debug!(node = %responder.peer(), %error, "connection closed");
                self.mail.served.fetch_sub(1, Ordering::AcqRel);
                let beside = answerer.map(|answerer| answerer.end());
                let held = responder.into_held().chain(receiving);
                for slot in held.chain(beside.into_iter().flatten()) {
                    self.servings.free(slot);
                }
            }
        }
    }
}
