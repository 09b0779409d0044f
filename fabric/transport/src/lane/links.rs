//! How connections come to a lane, and how they leave it.

use std::os::fd::OwnedFd;

use super::*;

impl Lane {
    pub(super) fn drain_inbox(&mut self) {
        for message in self.inbox.open() {
            match message {
                InboxMessage::Connected(node, fd, established) => {
                    self.connected(node, fd, *established)
                }
                InboxMessage::Accepted(_, established) if !self.is_welcome(&established) => {
                    // It went while this was on its way.
                    self.inbox.served.fetch_sub(1, Ordering::AcqRel);
                }
                InboxMessage::Accepted(fd, established) => {
                    let responder = Responder::new(&established.agreed);
                    let pair_responder = PairResponder::new(&established);
                    match self.link(fd, *established, End::Responder(responder)) {
                        Some(index) => {
                            let link = self.links[index].as_deref_mut().expect("linked just now");
                            link.pair_responder = Some(pair_responder);
                            self.serve(index, EventFlags::IN);
                        }
                        None => {
                            self.inbox.served.fetch_sub(1, Ordering::AcqRel);
                        }
                    }
                }
                InboxMessage::Unreachable(node) => self.unreachable(node, LinkState::Down),
                InboxMessage::Unknown(node) => self.unreachable(node, LinkState::None),
            }
        }
    }

    fn is_welcome(&self, established: &Established) -> bool {
        let agreed = &established.agreed;
        self.control.admit(agreed.peer, agreed.incarnation) == Admission::Welcome
    }

    /// Closes the connections of nodes that are no members any more, if the members have changed.
    pub(super) fn look_at_members(&mut self) {
        let version = self.control.members_version();
        if std::mem::replace(&mut self.members_version, version) == version {
            return;
        }
        for index in 0..self.links.capacity() {
            if !self.links.is_taken(index) {
                continue;
            }
            let link = self.links[index].as_deref().expect("it is linked");
            let stays = match &link.end {
                // A newer start than this node knows may have answered.
                End::Caller(node, _) => self.control.has_member(*node),
                End::Responder(responder) => {
                    let admission = self.control.admit(responder.peer(), link.incarnation);
                    admission == Admission::Welcome
                }
            };
            if !stays {
                self.lose(index, &LinkError::NotMember);
            }
        }
    }

    pub(super) fn connected(&mut self, node: NodeId, fd: OwnedFd, established: Established) {
        let caller = Caller::new(&established.agreed);
        let Some(peer) = self.peers.get(&node) else {
            return;
        };
        let requester = Requester::new(&established, self.control.pairs(), peer.pause);
        if let LinkState::Up(_) = peer.link {
            return;
        }
        match self.link(fd, established, End::Caller(node, caller)) {
            Some(index) => {
                self.peers.get_mut(&node).expect("looked up above").link = LinkState::Up(index);
                let link = self.links[index].as_deref_mut().expect("linked just now");
                let reason = match requester {
                    Ok(requester) => {
                        link.requester = Some(requester);
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
            None => self.unreachable(node, LinkState::None),
        }
    }

    pub(super) fn unreachable(&mut self, node: NodeId, state: LinkState) {
        if let Some(peer) = self.peers.get_mut(&node) {
            if let LinkState::Up(_) = peer.link {
                return;
            }
            peer.link = state;
            if !peer.waiting.is_empty() {
                peer.waiting.clear();
                self.events.push_back(Event::Lost(node));
            }
        }
    }

    /// Takes a connection up; `None`: there is no room for it, and it is closed. Whoever owns its end is then
    /// ready to lose it, and [serves](Self::serve) it once: what came along with the handshake tells of
    /// itself no more.
    pub(super) fn link(
        &mut self,
        fd: OwnedFd,
        established: Established,
        mut end: End,
    ) -> Option<u32> {
        let index = self.links.take()?;
        let Established {
            session,
            rest,
            agreed,
        } = established;
        let plain = session.is_none();
        if plain {
            match &mut end {
                End::Caller(_, caller) => caller.reader().push(&rest),
                End::Responder(responder) => responder.reader().push(&rest),
            }
        }
        let socket = Socket::new(fd, session, if plain { &[] } else { &rest });
        let key = self.links.key(index).0;
        if let Err(error) = self.readiness.add_connection(socket.fd(), key) {
            tracing::error!(%error, "cannot watch a connection");
            self.links.give_back(index);
            return None;
        }
        if self.links.taken() == 1 {
            self.readiness.set_timer(TICK_MS);
        }
        self.links[index] = Some(Box::new(Link {
            requester: None,
            pair_responder: None,
            socket,
            end,
            incarnation: agreed.incarnation,
            // Looked up with the first request.
            access: (u64::MAX, Access::Layers(Arc::default())),
            receiving: None,
            stalled: false,
            dirty: false,
            blocked: false,
        }));
        Some(index)
    }

    /// A connection is over.
    pub(super) fn lose(&mut self, index: u32, error: &LinkError) {
        let Some(mut link) = self.links[index].take() else {
            return;
        };
        self.links.give_back(index);
        self.pairs.remove(index);
        // No device works on anybody's memory when the loss is told.
        let requester = link.requester.take();
        let pause = requester.map(|requester| requester.end(&mut self.pairs.bounces));
        let pair_responder = link.pair_responder.take();
        if self.links.taken() == 0 {
            self.readiness.set_timer(0);
        }
        let receiving = link.receiving;
        match link.end {
            End::Caller(node, caller) => {
                let peer = self.peers.get_mut(&node).expect("a caller has a peer");
                if let Some(pause) = pause {
                    peer.pause = pause;
                    let way = self.control.peer_routes.forget(self.index, node);
                    peer.why_not = way.and_then(Result::err);
                }
                let idle = caller.in_flight() == 0 && peer.waiting.is_empty();
                drop(caller);
                if idle {
                    tracing::debug!(%node, %error, "connection closed");
                    peer.link = LinkState::None;
                    return;
                }
                tracing::warn!(%node, %error, "connection lost with requests in flight");
                peer.link = LinkState::Down;
                peer.waiting.clear();
                self.events.push_back(Event::Lost(node));
                // Found while sending, it would else be told only with the next thing that comes.
                self.inbox.eventfd.signal();
                self.control.command(ConnectorCommand::Dial {
                    lane: self.index,
                    node,
                    failed: true,
                });
            }
            End::Responder(responder) => {
                tracing::debug!(node = %responder.peer(), %error, "connection closed");
                self.inbox.served.fetch_sub(1, Ordering::AcqRel);
                let endpoint = pair_responder.map(|pair_responder| pair_responder.end());
                let held = responder.into_held().chain(receiving);
                for slot in held.chain(endpoint.into_iter().flatten()) {
                    self.servings.free(slot);
                }
            }
        }
    }
}
