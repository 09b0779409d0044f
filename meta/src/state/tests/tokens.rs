//! Join tokens.

use super::*;
use crate::model::{Duty, Happening, NodeState};
use crate::pki::{JoinToken, TokenHash};
use crate::refusal::{JoinRefusal, MAX_TOKENS};

fn create(world: &mut World, hash: TokenHash, expires_at: u64, at: u64) -> Reply {
    world.run(&Command::CreateToken {
        token: hash,
        expires_at: UnixMillis(expires_at),
        at: UnixMillis(at),
    })
}

fn redeem(world: &mut World, hash: TokenHash, at: u64) -> Reply {
    world.run(&Command::RedeemToken {
        token: hash,
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
    assert!(matches!(
        again,
        Err(Refusal::Map(MapRefusal::WasRemoved { node: NodeId(2) }))
    ));
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
    let duty = Duty::Absent;
    run(Command::SetNodeDuty { node, duty, at: AT });
    run(register(7, 0));
    run(down(7));
    run(register(8, 7));
    let told: Vec<Happening> = tables::EVENTS
        .all(&world.records)
        .unwrap()
        .into_iter()
        .skip(begun)
        .map(|event| event.what)
        .collect();
    assert_eq!(
        told,
        [
            Happening::NodeJoined { node },
            Happening::NodeUp { node },
            Happening::NodeDown { node },
            Happening::NodeRestarted { node },
        ]
    );
}
