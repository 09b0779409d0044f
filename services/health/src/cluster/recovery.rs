//! What a recovery of the metadata leaves an operator to do.

use api::moment::Moment;
use meta::Recovery;
use service::code::Code;
use service::found::Found;
use service::view::View;

fn recovery_of(view: &View) -> Option<&Recovery> {
    view.map.cluster()?.recovery.as_ref()
}

/// After a restoration, or a recovery with older metadata, all I/O waits for an operator.
pub fn choosing(view: &View) -> Option<Found> {
    let recovery = recovery_of(view).filter(|recovery| recovery.chooses)?;
    let (all, back) = (
        view.map.devices().count(),
        view.map
            .devices()
            .filter(|one| view.map.is_served(one))
            .count(),
    );
    let how = match recovery.backup_at {
        Some(taken) => format!("were restored from a backup of {}", Moment::from(taken)),
        None => "go on from a node that may not have the newest".to_owned(),
    };
    let what =
        format!("the metadata {how}: which replicas count is to be decided, and all I/O waits");
    let doing = format!(
        "{back} of {all} devices are back: start all nodes that have devices, then run `penstock meta resume`"
    );
    Some(Found::new(Code::ReplicasToChoose, "", what, doing).since(Some(recovery.at.into())))
}

/// What devices hold of volumes that the metadata do not know is kept until an operator says otherwise.
pub fn unknown(view: &View) -> Option<Found> {
    let is_told = |one: &&Recovery| !one.unknown.is_empty() && !one.chooses;
    let recovery = recovery_of(view).filter(is_told)?;
    let what = "data of volumes that were made before the recovery, and that the metadata do not know, \
                are kept";
    let doing = "`penstock meta forget-unknown` gives their space back, if there are any";
    Some(Found::new(Code::UnknownVolumes, "", what, doing).since(Some(recovery.at.into())))
}
