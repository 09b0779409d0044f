//! Calls about nodes, join tokens and devices.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Meta, a_device, a_node, an_admission};
use crate::command::{Command, DeviceSpec, Lost, NodeSpec};
use crate::error::MetaError;
use crate::ids::{DeviceId, Incarnation, NodeId, UnixMillis};
use crate::model::{AdminState, Device, DeviceState, Node, Role, Token};
use crate::pki::{JoinToken, TokenHash};
use crate::state::tables::{DEVICES, NODES, TOKENS};

impl Meta {
    /// Adds a node to the map, says that its process started, or changes its name, roles, labels and
    /// addresses.
    pub async fn register_node(&self, node: NodeSpec) -> Result<Node, MetaError> {
        let known = self.read(|view| NODES.get(view, &node.id)).await?;
        let replaces = known.map_or(Incarnation::default(), |node| node.incarnation);
        a_node(
            self.propose(Command::RegisterNode {
                node,
                replaces,
                at: UnixMillis::now(),
            })
            .await?,
        )
    }

    /// Makes a token that lets one node join within this time, with some of these roles. The cluster keeps
    /// only its hash.
    pub async fn create_join_token(
        &self,
        lifetime: Duration,
        roles: &BTreeSet<Role>,
    ) -> Result<JoinToken, MetaError> {
        let roles = (!Role::are_all(roles)).then(|| roles.clone());
        let (token, at) = (JoinToken::draw(), UnixMillis::now());
        let millis = u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX);
        self.propose(Command::CreateToken {
            token: token.hash(),
            roles,
            expires_at: UnixMillis(at.0.saturating_add(millis)),
            at,
        })
        .await?;
        Ok(token)
    }

    /// What is kept of a token; nothing if it is not known, or was used.
    pub async fn get_join_token(&self, token: &JoinToken) -> Result<Option<Token>, MetaError> {
        let hash = token.hash();
        self.read(|view| TOKENS.get(view, &hash)).await
    }

    /// The tokens that were made and not used, also those that have expired.
    pub async fn list_join_tokens(&self) -> Result<Vec<Token>, MetaError> {
        self.read(|view| TOKENS.all(view)).await
    }

    /// Forgets a token: nobody can join with it any more.
    pub async fn revoke_join_token(&self, token: TokenHash) -> Result<(), MetaError> {
        self.propose(Command::RevokeToken { token }).await.map(drop)
    }

    /// Takes a token, which is then used up, and gives the bearer, who asks for these roles, the number of
    /// its node.
    pub async fn redeem_join_token(
        &self,
        token: &JoinToken,
        roles: &BTreeSet<Role>,
    ) -> Result<NodeId, MetaError> {
        let redeem = Command::RedeemToken {
            token: token.hash(),
            roles: roles.clone(),
            at: UnixMillis::now(),
        };
        an_admission(self.propose(redeem).await?)
    }

    /// Says whether a node is to be emptied (`on`) or may hold data again. Its groups move while I/O goes on;
    /// it is empty once no group has a member there.
    pub async fn drain_node(&self, node: NodeId, on: bool) -> Result<Node, MetaError> {
        let admin_state = if on {
            AdminState::Draining
        } else {
            AdminState::Active
        };
        let at = UnixMillis::now();
        a_node(
            self.propose(Command::SetNodeAdminState {
                node,
                admin_state,
                at,
            })
            .await?,
        )
    }

    /// Forgets a node with its devices: one that is up must be empty, one that is down must not be the last
    /// to hold anything. Returns when the node's vote counts no more, so that it can be switched off.
    pub async fn remove_node(&self, node: NodeId) -> Result<Node, MetaError> {
        let at = UnixMillis::now();
        let removed = a_node(self.propose(Command::RemoveNode { node, at }).await?)?;
        let name = removed.name.to_string();
        self.core.wait_without_vote(node, name).await?;
        Ok(removed)
    }

    /// Removes a node that may be up and serve guests, together with its attachments; otherwise like
    /// [`Self::remove_node`]. Other nodes can lease the volumes that it writes within
    /// [`crate::LEASE_DURATION`].
    pub async fn evict_node(&self, node: NodeId) -> Result<Node, MetaError> {
        let at = UnixMillis::now();
        let evicted = a_node(self.propose(Command::EvictNode { node, at }).await?)?;
        let name = evicted.name.to_string();
        self.core.wait_without_vote(node, name).await?;
        Ok(evicted)
    }

    /// Forgets a node that is down, or a device that is not served, and gives up what only that has:
    /// placement groups go on with the next best replicas. Of a node it returns when its vote counts no more.
    pub async fn remove_lost(&self, lost: Lost) -> Result<(), MetaError> {
        let at = UnixMillis::now();
        // The next map does not name it any more.
        let map = Arc::clone(&self.core.map.borrow());
        self.propose(Command::RemoveLost { lost, at }).await?;
        match lost {
            Lost::Node(node) => {
                let name = map.node_name(node);
                self.core.wait_without_vote(node, name).await
            }
            Lost::Device(_) => Ok(()),
        }
    }

    /// Says that this start of this node goes on without one of its devices, as it could not open it.
    pub async fn lose_device(&self, device: DeviceId) -> Result<Device, MetaError> {
        a_device(
            self.propose(Command::LoseDevice {
                device,
                incarnation: self.core.incarnation,
                for_long: false,
                at: UnixMillis::now(),
            })
            .await?,
        )
    }

    /// Says whether a device is to be emptied (`on`) or may hold data again.
    pub async fn drain_device(&self, device: DeviceId, on: bool) -> Result<Device, MetaError> {
        let at = UnixMillis::now();
        a_device(
            self.propose(Command::DrainDevice { device, on, at })
                .await?,
        )
    }

    /// All nodes.
    pub async fn list_nodes(&self) -> Result<Vec<Node>, MetaError> {
        self.read(|view| NODES.all(view)).await
    }

    /// Adds a device, or says that it is back, maybe at another path or with another size. A node of several
    /// does that once it is registered: [`Meta::heartbeat_valid_until`] tells.
    pub async fn register_device(&self, device: DeviceSpec) -> Result<Device, MetaError> {
        let incarnation = match device.node == self.core.id {
            true => self.core.incarnation,
            false => Incarnation::default(),
        };
        a_device(
            self.propose(Command::RegisterDevice {
                device,
                incarnation,
                at: UnixMillis::now(),
            })
            .await?,
        )
    }

    /// Says whether a device can hold data.
    pub async fn set_device_state(
        &self,
        device: DeviceId,
        state: DeviceState,
    ) -> Result<Device, MetaError> {
        let at = UnixMillis::now();
        a_device(
            self.propose(Command::SetDeviceState { device, state, at })
                .await?,
        )
    }

    /// Forgets a device that holds no data of volumes.
    pub async fn remove_device(&self, device: DeviceId) -> Result<Device, MetaError> {
        let at = UnixMillis::now();
        a_device(self.propose(Command::RemoveDevice { device, at }).await?)
    }

    /// All devices.
    pub async fn list_devices(&self) -> Result<Vec<Device>, MetaError> {
        self.read(|view| DEVICES.all(view)).await
    }
}
