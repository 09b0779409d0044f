//! Namespace groups.

use meta::{FilesystemSpec, Start};

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_group_goes_on_over_tls_when_one_of_its_nodes_is_lost() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new(CLUSTER));
    let (path, start) = (dir.path(), Start::NewCluster);
    let (one, _) = Cluster::member_that(path, &authority, 1, start, true).await;
    let meta = one.node().meta();
    meta.register_device(device(1)).await.unwrap();
    let cluster = one.node().cluster_uuid();
    let mut members = vec![one];
    for id in [2, 3] {
        let start = Start::Join { cluster };
        let (member, spec) = Cluster::member_that(path, &authority, id, start, true).await;
        meta.register_node(spec).await.unwrap();
        members.push(member);
    }
    until(async || (meta.raft_status().voters.len() == 3).then_some(())).await;
    let spec = FilesystemSpec {
        name: "home".to_owned(),
        pool: "default".to_owned(),
    };
    let uuid = Uuid::from_u128(7);
    let made = meta.create_filesystem(uuid, spec).await.unwrap();
    let voters = async || {
        let groups = members[1].node().meta().namespace_groups();
        groups
            .get(&made.group)
            .filter(|group| group.voters.len() == 3)?
            .leader
    };
    let leader = until(voters).await;
    let lost = members
        .iter()
        .position(|member| member.node().id() == leader);
    let lost = lost.unwrap();
    members[lost].kill().await;
    let rest = members.iter().filter(|member| member.node.is_some());
    for member in rest.collect::<Vec<_>>() {
        let group = member.node().meta().filesystems(made.group);
        let answers = group
            .read(vec![(made.id, namespace::Query::Statistics)])
            .await;
        let answers = answers.unwrap();
        assert!(
            matches!(answers[..], [Ok(namespace::Answer::Statistics(Some(_)))]),
            "{answers:?}"
        );
    }
    for mut member in members {
        if let Some(node) = member.node.take() {
            node.shutdown().await.unwrap();
        }
    }
}
