//! Join tokens: each lets one node in.

use std::collections::BTreeSet;
use std::time::Duration;

use api::failure::{Failure, Kind, Result};
use api::types::{OpenToken, Token, TokenCreate};
use meta::net::enrol::{EnrolmentEndpoint, Invitation};
use meta::pki::{TokenHash, fingerprint};
use meta::{Meta, Role, UnixMillis};
use service::failures::meta_failure;

use crate::control::{Membership, failed};
use crate::nodes::Nodes;

/// Roles by their words.
fn roles_of(words: &[String]) -> Result<BTreeSet<Role>> {
    let role = |word: &String| {
        let found = Role::all()
            .into_iter()
            .find(|role| role.to_string() == *word);
        found.ok_or_else(|| {
            let error = format!("there is no role '{word}'");
            Failure::invalid(error, "give some of meta, storage, host, nfs")
        })
    };
    words.iter().map(role).collect()
}

/// Digits of a token's hash that are its id, and fewest that are taken for one.
const TOKEN_ID_DIGITS: usize = 12;
const TOKEN_ID_MIN: usize = 4;

fn token_id(hash: TokenHash) -> String {
    let mut id = hash.to_string();
    id.truncate(TOKEN_ID_DIGITS);
    id
}

fn open_token(token: &meta::Token) -> OpenToken {
    OpenToken {
        id: token_id(token.hash),
        roles: token.roles.iter().map(Role::to_string).collect(),
        created_at_ms: token.created_at.0,
        expires_at_ms: token.expires_at.0,
    }
}

impl Nodes {
    /// Makes a token with which a node can join.
    pub async fn token_create(&self, request: &TokenCreate) -> Result<Token> {
        let Some(membership) = &self.membership else {
            return Err(Failure::new(
                Kind::Conflict,
                "this node is a cluster of its own, without a network that others could join by",
                format!(
                    "stop it and make it the first node of a cluster with `penstock init --data {} --listen \
                     ADDRESS`: it keeps its data",
                    self.data.display()
                ),
            ));
        };
        let roles = match &request.roles {
            Some(words) => roles_of(words)?,
            // It serves guests. It stores no data and does not get the key of the authority.
            None => BTreeSet::from([Role::Host]),
        };
        let endpoints = self.endpoints(membership).await?;
        let authority = fingerprint(&membership.identity.ca).map_err(failed)?;
        let lifetime = Duration::from_secs(request.lifetime_s);
        let token = self.cluster.asked.create_join_token(lifetime, &roles).await;
        let token = token.map_err(meta_failure)?;
        let id = token_id(token.hash());
        let invitation = Invitation {
            cluster: membership.identity.record.cluster,
            authority,
            token,
            endpoints,
        };
        Ok(Token {
            id,
            token: invitation.to_string(),
            roles: roles.iter().map(Role::to_string).collect(),
            expires_at_ms: UnixMillis::now()
                .0
                .saturating_add(request.lifetime_s.saturating_mul(1000)),
        })
    }

    /// Tokens that somebody can still join with.
    pub async fn tokens(&self, reader: &Meta) -> Result<Vec<OpenToken>> {
        let now = UnixMillis::now();
        let known = reader.list_join_tokens().await.map_err(meta_failure)?;
        let open = known.iter().filter(|token| token.expires_at > now);
        Ok(open.map(open_token).collect())
    }

    /// Revokes the token whose id begins so.
    pub async fn token_revoke(&self, id: &str) -> Result<OpenToken> {
        let known = self
            .cluster
            .asked
            .list_join_tokens()
            .await
            .map_err(meta_failure)?;
        let id = id.to_lowercase();
        let mut meant = known
            .iter()
            .filter(|token| token.hash.to_string().starts_with(&id));
        match (meant.next(), meant.next()) {
            (Some(token), None) if id.len() >= TOKEN_ID_MIN => {
                let revoked = self.cluster.asked.revoke_join_token(token.hash).await;
                revoked.map_err(meta_failure)?;
                Ok(open_token(token))
            }
            (Some(_), _) => Err(Failure::invalid(
                format!("'{id}' does not say which join token is meant"),
                "give the whole id that `penstock token list` prints",
            )),
            (None, _) => Err(Failure::new(
                Kind::NotFound,
                format!("no open join token has the id '{id}'"),
                "see `penstock token list`; a token that was used is gone from it",
            )),
        }
    }

    /// Where nodes can join: here first. Of other nodes the port is taken to be the same.
    async fn endpoints(&self, membership: &Membership) -> Result<Vec<EnrolmentEndpoint>> {
        let own = EnrolmentEndpoint {
            node: self.cluster.node_id(),
            address: membership.settings.enrol(),
        };
        let mut endpoints = Vec::new();
        endpoints.extend(membership.identity.ca_key.is_some().then_some(own));
        let nodes = self
            .cluster
            .asked
            .list_nodes()
            .await
            .map_err(meta_failure)?;
        let others = nodes
            .into_iter()
            .filter(|node| node.id != own.node && node.roles.contains(&Role::Meta));
        endpoints.extend(others.filter_map(|node| {
            let mut address: std::net::SocketAddr = node.control_address.parse().ok()?;
            address.set_port(membership.settings.enrol_port);
            Some(EnrolmentEndpoint {
                node: node.id,
                address,
            })
        }));
        Ok(endpoints)
    }
}
