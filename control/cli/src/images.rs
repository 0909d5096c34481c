//! The `image` commands: import, add, list, inspect, remove.

use crate::ceph::CephArguments;
use crate::container::ContainerRecord;
use crate::context::Context;
use crate::failure::{Code, Failure, Result};
use crate::image_store::{self, with_new_store, with_store};
use crate::signals::Signals;
use crate::text::{age, count, plain, print, print_json, print_table, size, table};
use indicatif::{ProgressBar, ProgressStyle};
use poolfs_image::{
    ClusterStore, Digest, Holder, ImageError, ImageRecord, ImageStore, Limits, Progress, Removed, StoreLock,
};
use std::path::Path;
use std::time::SystemTime;

/// Characters of a digest that are shown.
const SHORT_DIGEST: usize = 12;

/// Import an image, with a progress bar on a terminal; into the directory `to` of a cluster, if one is given.
pub fn import(context: &Context, name: &str, source: &str, to: Option<&Path>, ceph: &CephArguments) -> Result<()> {
    let of_image = |failure: Failure| failure.about(format!("image {name}"));
    let mut bar = Bar::cancelled_by(Signals::catch()?);
    let image = match to {
        Some(to) => {
            let at = image_store::named(context, "--to", to, ceph)?;
            import_to(context, name, source, at, &mut bar).map_err(of_image)?
        }
        None => {
            ceph.access(&[], |path| Ok(path.to_owned()))?;
            let imported = context.images()?.import(name, source, &Limits::default(), &mut bar);
            imported.map_err(|error| of_image(error.into()))?
        }
    };
    show(context, &image)
}

fn show(context: &Context, image: &ImageRecord) -> Result<()> {
    if context.json {
        return print_json(image);
    }
    let at = image.at.as_ref().map_or_else(String::new, |at| format!(", at {}", at.directory.display()));
    let layers = count(image.layers.len() as u64, "layer");
    print(&format!("{}: {} in {layers}{at}\n", image.name, size(image.bytes())))
}

fn import_to(context: &Context, name: &str, source: &str, at: ClusterStore, bar: &mut Bar) -> Result<ImageRecord> {
    let local = context.images()?;
    refuse_known(&local, name)?;
    let holder = holder(context, &local)?;
    with_new_store(context, &at, |store| {
        refuse_known_at(store, name, &at)?;
        // Before the image is: then nobody finds it without a host that has it.
        store.hold_new(name, &holder)?;
        let image = store.import(name, source, &Limits::default(), bar).inspect_err(|_| {
            // The first error is the one to report; of an image that is not there nobody looks at its hosts.
            let _ = store.release(name, &holder.id);
        })?;
        Ok(local.adopt(image, at.clone())?)
    })
}

/// Make an image known that another host has imported to a cluster.
pub fn add(context: &Context, name: &str, from: &Path, ceph: &CephArguments) -> Result<()> {
    let _signals = Signals::catch()?;
    let local = context.images()?;
    refuse_known(&local, name)?;
    let at = image_store::named(context, "--from", from, ceph)?;
    let holder = holder(context, &local)?;
    let image = with_store(context, &at, |store| {
        let image = store.get(name).map_err(|error| match error {
            ImageError::Absent(_) => absent(store, name, &at),
            other => other.into(),
        })?;
        store.hold(name, &holder)?;
        Ok(local.adopt(image, at.clone())?)
    })?;
    show(context, &image)
}

/// The failure that a store has no such image.
fn absent(store: &ImageStore, name: &str, at: &ClusterStore) -> Failure {
    let names: Vec<String> = store.list().unwrap_or_default().into_iter().map(|image| image.name).collect();
    let has = if names.is_empty() { "it has none".to_owned() } else { format!("it has {}", names.join(", ")) };
    let directory = at.directory.display();
    let remedy = format!("check the name; `poolfs image import {name} SOURCE --to {directory}` imports it");
    Failure::not_found(format!("image {name}"), format!("{directory} has no such image: {has}"), remedy)
}

/// Refuse a name that an image of a store at a cluster has. Of an import that was killed when it was as good as done, the image may be there.
pub fn refuse_known_at(store: &ImageStore, name: &str, at: &ClusterStore) -> Result<()> {
    if !store.has(name) {
        return Ok(());
    }
    let directory = at.directory.display();
    let cause = format!("{directory} has an image of that name already");
    let remedy = format!("`poolfs image add {name} --from {directory}` makes it known here; or take another name");
    Err(Failure::new(format!("image {name}"), cause, remedy).with_code(Code::Exists))
}

/// Refuse a name that an image of this host has, before anything long is done.
pub fn refuse_known(local: &ImageStore, name: &str) -> Result<()> {
    match local.get(name) {
        Err(ImageError::Absent(_)) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err(ImageError::Exists(name.to_owned()).into()),
    }
}

/// What a store at a cluster is to know of this host.
pub fn holder(context: &Context, local: &ImageStore) -> Result<Holder> {
    let host = context.host.read_text(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default();
    Ok(Holder { id: local.host_id()?, description: format!("{} ({})", host.trim(), context.state.display()) })
}

/// Print the images.
pub fn list(context: &Context) -> Result<()> {
    let images = context.images()?.list()?;
    if context.json {
        return print_json(&images);
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let mut table = table(&["name", "layers", "size", "imported", "at"]);
    for image in &images {
        let ago = format!("{} ago", age(now.saturating_sub(image.imported_seconds)));
        let at = image.at.as_ref().map_or_else(|| "this host".to_owned(), |at| at.directory.display().to_string());
        table.add_row([image.name.clone(), image.layers.len().to_string(), size(image.bytes()), ago, at]);
    }
    print_table(&table)
}

/// Print everything about an image.
pub fn inspect(context: &Context, name: &str) -> Result<()> {
    let image = context.images()?.get(name)?;
    if context.json { print_json(&image) } else { print(&described(&image)) }
}

fn described(image: &ImageRecord) -> String {
    let config = &image.config;
    let or_none = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    let mut text = format!(
        "image       {}\nsource      {}\nsize        {}\nentrypoint  {}\ncommand     {}\ndirectory   {}\nuser        {}\n",
        image.name,
        image.source,
        size(image.bytes()),
        or_none(config.entrypoint.join(" ")),
        or_none(config.cmd.join(" ")),
        or_none(config.working_directory.clone()),
        or_none(config.user.clone()),
    );
    if let Some(at) = &image.at {
        text += &format!("at          {}\n", at.directory.display());
    }
    for variable in &config.env {
        text += &format!("env         {variable}\n");
    }
    for (key, value) in &config.labels {
        text += &format!("label       {key}={value}\n");
    }
    for layer in &image.layers {
        let digest = &layer.digest.hex()[..SHORT_DIGEST];
        text += &format!("layer       {digest}  {} in {}\n", size(layer.bytes), count(layer.members, "file"));
    }
    text
}

/// Remove an image; with `force` also when containers were made of it, whose layers stay. One at a cluster goes there as well, unless another host has
/// it, or `force` is given.
pub fn remove(context: &Context, name: &str, force: bool) -> Result<()> {
    let store = context.images()?;
    let image = store.get(name)?;
    match &image.at {
        Some(at) if !force => {
            let _signals = Signals::catch()?;
            // Nothing is mounted for what is refused.
            refuse_used(&image, &context.containers()?.peek_all()?)?;
            let own = store.host_id()?;
            let (others, removed) = with_store(context, at, |there| {
                let (lock, known, _) = locked(context, &store, name, force)?;
                if known != image {
                    let cause = "another command has changed it meanwhile";
                    return Err(Failure::in_use(format!("image {name}"), cause, "try again"));
                }
                // In this order: if this is killed in between, the cluster keeps too much, and no layer that this host may use.
                store.forget(&lock, name)?;
                there.release(name, &own)?;
                // Nobody makes containers of it here any more; of other images they are made while its layers go.
                drop(lock);
                let others = there.holders(name)?;
                // A command that was killed may have removed it before.
                let is_last = others.is_empty() && there.has(name);
                let removed = if is_last { there.remove(&there.lock(true)?, name, &[])? } else { Removed::default() };
                Ok((others, removed))
            })?;
            told_removed(context, name, at, &others, removed)
        }
        Some(at) => {
            let (lock, ..) = locked(context, &store, name, force)?;
            store.forget(&lock, name)?;
            let directory = at.directory.display();
            if context.json {
                return print_json(&serde_json::json!({"image": name, "layers_removed": 0, "at": at.directory}));
            }
            let how = format!("`poolfs image add {name} --from {directory}` makes it known again");
            print(&format!("{name}: removed here; it stays at {directory}, and {how}\n"))
        }
        None => {
            let (lock, _, containers) = locked(context, &store, name, force)?;
            let here = containers.into_iter().filter(|container| container.layers_at.is_none());
            let in_use: Vec<Digest> = here.flat_map(|container| container.layers).collect();
            let removed = store.remove(&lock, name, &in_use)?;
            if context.json {
                return print_json(&serde_json::json!({"image": name, "layers_removed": removed.layers}));
            }
            print(&format!("{name}: removed, with {} nobody else uses\n", count(removed.layers, "layer")))
        }
    }
}

/// The lock under which an image may be removed, the image, and all containers.
fn locked(
    context: &Context,
    store: &ImageStore,
    name: &str,
    force: bool,
) -> Result<(StoreLock, ImageRecord, Vec<ContainerRecord>)> {
    // A container that is being made holds the lock shared until its record names its layers.
    let lock = store.lock(true)?;
    let containers: Vec<ContainerRecord> = context.containers()?.peek_all()?;
    let image = store.get(name)?;
    if !force {
        refuse_used(&image, &containers)?;
    }
    Ok((lock, image, containers))
}

fn refuse_used(image: &ImageRecord, containers: &[ContainerRecord]) -> Result<()> {
    let users = users_of(image, containers);
    if users.is_empty() {
        return Ok(());
    }
    let cause = format!("{} made of it: {}", count(users.len() as u64, "container"), users.join(", "));
    let remedy = "`poolfs rm` removes a container; with --force the image goes, and they keep its layers";
    Err(Failure::in_use(format!("image {}", image.name), cause, remedy))
}

fn told_removed(context: &Context, name: &str, at: &ClusterStore, others: &[Holder], removed: Removed) -> Result<()> {
    let others: Vec<String> = others.iter().map(|holder| plain(&holder.description)).collect();
    if context.json {
        let layers = removed.layers;
        let told = serde_json::json!({"image": name, "layers_removed": layers, "at": at.directory, "hosts": others});
        return print_json(&told);
    }
    let directory = at.directory.display();
    print(&match others[..] {
        [] => format!("{name}: removed, with {} at {directory} nobody else uses\n", count(removed.layers, "layer")),
        _ => format!("{name}: removed here; it stays at {directory} for {}\n", others.join(", ")),
    })
}

/// The containers, running or not, that were made of an image, and not of one that had its name before.
fn users_of(image: &ImageRecord, containers: &[ContainerRecord]) -> Vec<String> {
    let is_of = |container: &&ContainerRecord| {
        container.image == image.name
            && container.layers_at.as_deref() == image.at.as_ref().map(|at| at.directory.as_path())
            && container.layers.iter().eq(image.layers.iter().map(|layer| &layer.digest))
    };
    containers.iter().filter(is_of).map(|container| container.name.clone()).collect()
}

/// A bar for each thing that is read; indicatif draws nothing when the output is no terminal.
pub struct Bar {
    bar: Option<ProgressBar>,
    signals: Signals,
    is_cancelled: bool,
}

impl Bar {
    /// What is read is given up when one of these signals comes.
    pub fn cancelled_by(signals: Signals) -> Bar {
        Bar { bar: None, signals, is_cancelled: false }
    }
}

impl Progress for Bar {
    fn begin(&mut self, what: &str, bytes: u64) {
        let bar = ProgressBar::new(bytes);
        let form = "{spinner} {wide_msg} {bar:30} {bytes:>10} of {total_bytes:10} {eta:>4}";
        if let Ok(style) = ProgressStyle::with_template(form) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        self.bar = Some(bar);
    }

    fn advance(&mut self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn is_cancelled(&mut self) -> bool {
        self.is_cancelled = self.is_cancelled || self.signals.end_was_asked();
        self.is_cancelled
    }
}
