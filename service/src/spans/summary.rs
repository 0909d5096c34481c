//! Percentiles over all requests of a trace.

use super::clock::Times;
use poolfs_service_protocol::{Histogram, KindTimes, Layer, OperationPath, Percentiles};
use std::collections::BTreeMap;

#[derive(Default)]
struct Cell {
    queue: Histogram,
    service: Histogram,
    layers: [Histogram; Layer::COUNT],
    reached: [bool; Layer::COUNT],
}

/// By path and kind, of which there are few.
#[derive(Default)]
pub(super) struct Summary(BTreeMap<(OperationPath, &'static str), Cell>);

impl Summary {
    pub(super) fn record(
        &mut self,
        path: OperationPath,
        operation: &'static str,
        queue_ns: Option<u64>,
        times: &Times,
    ) {
        let cell = self.0.entry((path, operation)).or_default();
        queue_ns.into_iter().for_each(|queue| cell.queue.record(queue));
        cell.service.record(times.iter().sum());
        for (layer, &time) in times.iter().enumerate() {
            cell.layers[layer].record(time);
            cell.reached[layer] |= time > 0;
        }
    }

    pub(super) fn report(&self) -> Vec<KindTimes> {
        let row = |(&(path, operation), cell): (&(OperationPath, &'static str), &Cell)| KindTimes {
            operation: operation.to_owned(),
            path,
            count: cell.service.count(),
            queue: (cell.queue.count() > 0).then(|| Percentiles::from(&cell.queue)),
            service: (&cell.service).into(),
            layers: Layer::ALL
                .into_iter()
                .filter(|&layer| cell.reached[layer as usize])
                .map(|layer| (layer, Percentiles::from(&cell.layers[layer as usize])))
                .collect(),
        };
        self.0.iter().map(row).collect()
    }
}
