//! How much memory of guests the daemon maps and pins.

use api::failure::{Failure, Result};
use api::size::Size;
use vhost_backend::memory::budget::Limit;

/// The bound that a pair of keys configures: `KEY_per_attachment` and `KEY`.
pub(super) fn limit(key: &str, per_attachment: Option<Size>, total: Option<Size>) -> Result<Limit> {
    let defaults = Limit::default();
    let total = total.map_or(defaults.total, |size| size.0);
    let Some(Size(per_attachment)) = per_attachment else {
        return Ok(Limit {
            per_attachment: defaults.per_attachment.min(total),
            total,
        });
    };
    if per_attachment > total {
        return Err(Failure::invalid(
            format!(
                "{key}_per_attachment = {} is more than {key} = {}, which all attachments have together",
                Size(per_attachment),
                Size(total)
            ),
            format!("lower it, or raise {key}"),
        ));
    }
    Ok(Limit {
        per_attachment,
        total,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachment_never_has_more_than_all() {
        let size = |tib: u64| Some(Size(tib << 40));
        let of = |per_attachment, total| limit("guest_memory_max", per_attachment, total);
        assert_eq!(of(None, None).unwrap(), Limit::default());
        let lowered = of(None, size(1)).unwrap();
        assert_eq!((lowered.per_attachment, lowered.total), (1 << 40, 1 << 40));
        let raised = of(size(8), size(64)).unwrap();
        assert_eq!((raised.per_attachment, raised.total), (8 << 40, 64 << 40));
        let told = of(size(8), size(4)).unwrap_err().to_string();
        assert!(
            told.contains(
                "guest_memory_max_per_attachment = 8T is more than guest_memory_max = 4T"
            ),
            "{told}"
        );
    }
}
