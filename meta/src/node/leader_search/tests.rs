use super::*;
use crate::node::testing::{HOST, META, OTHER_META, ScriptedNode};

fn at(node: u64) -> LeaderLocation {
    LeaderLocation {
        node: NodeId(node),
        address: format!("10.0.0.{}:7470", node % 256),
    }
}

#[test]
fn all_nodes_have_their_turn_to_be_asked() {
    let others: BTreeSet<NodeId> = (2..=12).map(NodeId).collect();
    let mut search = LeaderSearch::default();
    let mut asked = BTreeSet::new();
    for _ in 0..2 {
        let turn = search.turn(&others);
        assert_eq!(turn.len(), ASKED_MAX);
        asked.extend(turn);
    }
    assert_eq!(asked, others);
    assert!(search.turn(&BTreeSet::new()).is_empty());
}

#[test]
fn each_location_is_visited_once_until_its_node_answers() {
    let own = NodeId(1);
    let mut visits = Visits::default();
    assert!(!visits.begin(own, &at(1)), "itself");
    assert!(visits.begin(own, &at(2)));
    assert!(!visits.begin(own, &at(2)));
    let moved = |port: usize| LeaderLocation {
        address: format!("10.0.9.2:{port}"),
        ..at(2)
    };
    assert!(visits.begin(own, &moved(1)), "it did not answer there");
    visits.reached.insert(NodeId(2));
    assert!(!visits.begin(own, &moved(2)));
    let more = (3..100).filter(|node| visits.begin(own, &at(*node)));
    assert_eq!(more.count(), VISITED_MAX - 2, "bounded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_leader_that_is_named_is_visited_and_no_host_is_asked() {
    let node = ScriptedNode::open().await;
    {
        let mut script = node.script.lock();
        // A former leader and a present one, which names its successor. The first does not answer.
        script.leaders.insert(META, Some(at(91)));
        script.leaders.insert(OTHER_META, Some(at(92)));
        script.leaders.insert(NodeId(92), Some(at(93)));
        script.leaders.insert(NodeId(93), Some(at(93)));
        script.leaders.insert(HOST, Some(at(94)));
    }
    LeaderSearch::default().search(&node.core).await;
    let mut called = node.script.lock().called.clone();
    called.sort_unstable();
    let expected = [META.0, OTHER_META.0, 91, 92, 93].map(NodeId);
    assert_eq!(called, expected);
    node.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_of_leaders_that_do_not_exist_is_bounded() {
    let node = ScriptedNode::open().await;
    let mut search = LeaderSearch::default();
    for number in 1000..1100 {
        let named = [(META, Some(at(number))), (OTHER_META, Some(at(2 * number)))];
        node.script.lock().leaders.extend(named);
        search.search(&node.core).await;
        let kept = node.script.lock().kept.clone();
        let expected = [META.0, OTHER_META.0, number, 2 * number].map(NodeId);
        assert_eq!(kept, expected.into());
    }
    node.end().await;
}
