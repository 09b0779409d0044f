//! Join tokens.

use super::*;
use crate::model::{AdminState, EventKind, NodeState, Role};
use crate::pki::{JoinToken, TokenHash};
use crate::refusal::{JoinRefusal, MAX_TOKENS};

fn create(world: &mut World, hash: TokenHash, expires_at: u64, at: u64) -> Reply {
    world.run(&Command::CreateToken {
        token: hash,
        roles: None,
        expires_at: UnixMillis(expires_at),
        at: UnixMillis(at),
    })
}

fn redeem(world: &mut World, hash: TokenHash, at: u64) -> Reply {
    world.run(&Command::RedeemToken {
        token: hash,
        roles: Role::all(),
        at: UnixMillis(at),
    })
}

#[test]
fn a_token_lets_one_node_in_once() {
    let mut world = World::ready();
    world.node(5);
    let token = JoinToken::draw();
    create(&mut world, token.hash(), 100, 1).unwrap();
    let other = JoinToken::draw().hash();
    assert_eq!(
        redeem(&mut world, other, 2),
        Err(JoinRefusal::UnknownToken.into())
    );
    assert_eq!(
        redeem(&mut world, token.hash(), 99),
        Ok(Outcome::Admitted(NodeId(6)))
    );
    assert_eq!(
        redeem(&mut world, token.hash(), 99),
        Err(JoinRefusal::UnknownToken.into()),
        "used twice"
    );
    create(&mut world, other, 100, 1).unwrap();
    assert_eq!(
        redeem(&mut world, other, 2),
        Ok(Outcome::Admitted(NodeId(7))),
        "no number is given twice, also when its node never came"
    );
    let stored = world.records.values().any(|value| {
        let text = String::from_utf8_lossy(value).into_owned();
        text.contains(token.secret())
    });
    assert!(!stored, "the secret is in no record");
}

#[test]
fn an_expired_token_lets_nobody_in_and_makes_room_for_others() {
    let mut world = World::ready();
    let hashes: Vec<TokenHash> = (0..MAX_TOKENS).map(|_| JoinToken::draw().hash()).collect();
    for hash in &hashes {
        create(&mut world, *hash, 100, 1).unwrap();
    }
    let more = JoinToken::draw().hash();
    assert_eq!(
        create(&mut world, more, 200, 99),
        Err(JoinRefusal::TooManyTokens.into())
    );
    assert_eq!(
        redeem(&mut world, hashes[0], 100),
        Err(JoinRefusal::ExpiredToken.into())
    );
    create(&mut world, more, 200, 100).unwrap();
    assert_eq!(
        redeem(&mut world, hashes[0], 99),
        Err(JoinRefusal::UnknownToken.into())
    );
}

#[test]
fn a_removed_node_stays_out() {
    let mut world = World::ready();
    world.node(2);
    world
        .run(&Command::RemoveNode {
            node: NodeId(2),
            at: AT,
        })
        .unwrap();
    let again = world.run(&Command::RegisterNode {
        node: NodeSpec::new(NodeId(2), "node2"),
        replaces: Incarnation::default(),
        at: AT,
    });
    let (node, name) = (NodeId(2), "node2".to_owned());
    assert_eq!(again, Err(MapRefusal::WasRemoved { node, name }.into()));
}

#[test]
fn a_node_that_has_yet_to_start_is_not_told_as_down() {
    let mut world = World::ready();
    let begun = tables::EVENTS.all(&world.records).unwrap().len();
    let node = NodeId(2);
    let mut run = |command: Command| world.run(&command).unwrap();
    let register = |incarnation: u64, replaces: u64| Command::RegisterNode {
        node: NodeSpec {
            incarnation: Incarnation(incarnation),
            ..NodeSpec::new(node, "node2")
        },
        replaces: Incarnation(replaces),
        at: AT,
    };
    let down = |incarnation: u64| Command::SetNodeState {
        node,
        incarnation: Incarnation(incarnation),
        state: NodeState::Down,
        at: AT,
    };
    // Let in; nobody hears of it for long; then it starts, dies and starts again.
    run(register(0, 0));
    run(down(0));
    let admin_state = AdminState::Absent;
    run(Command::SetNodeAdminState {
        node,
        admin_state,
        at: AT,
    });
    run(register(7, 0));
    run(down(7));
    run(register(8, 7));
    let told: Vec<EventKind> = tables::EVENTS
        .all(&world.records)
        .unwrap()
        .into_iter()
        .skip(begun)
        .map(|event| event.what)
        .collect();
    assert_eq!(
        told,
        [
            EventKind::NodeJoined { node },
            EventKind::NodeUp { node },
            EventKind::NodeDown { node },
            EventKind::NodeRestarted { node },
        ]
    );
}

/// A token for hosts.
fn create_for(world: &mut World, roles: &[Role]) -> (TokenHash, Reply) {
    let token = JoinToken::draw().hash();
    let reply = world.run(&Command::CreateToken {
        token,
        roles: Some(roles.iter().copied().collect()),
        expires_at: UnixMillis(100),
        at: UnixMillis(1),
    });
    (token, reply)
}

fn redeem_as(world: &mut World, token: TokenHash, roles: &[Role]) -> Reply {
    world.run(&Command::RedeemToken {
        token,
        roles: roles.iter().copied().collect(),
        at: UnixMillis(2),
    })
}

#[test]
fn token_grants_only_its_roles_and_a_refusal_does_not_use_it_up() {
    let mut world = World::ready();
    let (token, made) = create_for(&mut world, &[Role::Host, Role::Nfs]);
    made.unwrap();
    let refused = redeem_as(&mut world, token, &[Role::Host, Role::Meta]).unwrap_err();
    let beyond = matches!(refused, Refusal::Join(JoinRefusal::RolesNotGranted { .. }));
    assert!(beyond, "{refused}");
    assert!(redeem_as(&mut world, token, &[Role::Host]).is_ok());
    let (_, none) = create_for(&mut world, &[]);
    assert_eq!(none, Err(JoinRefusal::NoRoles.into()));
}

#[test]
fn what_a_node_was_granted_stays_over_its_starts() {
    let mut world = World::ready();
    let mut start = |incarnation: u64, granted: &[Role], roles: &[Role]| {
        let known = tables::NODES.get(&world.records, &NodeId(2)).unwrap();
        let register = Command::RegisterNode {
            node: NodeSpec {
                roles: roles.iter().copied().collect(),
                granted: granted.iter().copied().collect(),
                incarnation: Incarnation(incarnation),
                ..NodeSpec::new(NodeId(2), "two")
            },
            replaces: known.map_or(Incarnation::default(), |node| node.incarnation),
            at: AT,
        };
        match world.run(&register).unwrap() {
            Outcome::Node(node) => node,
            other => panic!("{other:?}"),
        }
    };
    let both = [Role::Storage, Role::Host];
    let node = start(0, &both, &[Role::Host]);
    assert!(node.may_have(Role::Storage) && !node.may_have(Role::Meta));
    // It says nothing of that itself, and nobody believes it if it does.
    for granted in [&[][..], &[Role::Meta]] {
        let node = start(7, granted, &[Role::Host]);
        assert_eq!(node.granted, both.into());
    }
}

#[test]
fn a_revoked_token_lets_nobody_in() {
    let mut world = World::ready();
    let (token, other) = (JoinToken::draw().hash(), JoinToken::draw().hash());
    create(&mut world, token, 100, 1).unwrap();
    create(&mut world, other, 100, 1).unwrap();
    let revoke = Command::RevokeToken { token };
    world.run(&revoke).unwrap();
    assert_eq!(
        redeem(&mut world, token, 2),
        Err(JoinRefusal::UnknownToken.into())
    );
    assert_eq!(world.run(&revoke), Err(JoinRefusal::NothingToRevoke.into()));
    redeem(&mut world, other, 2).unwrap();
}
