# about: java: compiles 200 classes, packs and reads 60 jars, mapped files, channels, locks, walks, temporary files, threads
# packages: openjdk-17-jdk-headless
# version: java -version 2>&1 | sed -n '1s/.*"\(.*\)".*/\1/p'
# limit: 300
# Its own data of performance counters would go to /tmp.
export JAVA_TOOL_OPTIONS="-XX:-UsePerfData -XX:TieredStopAtLevel=1"
mkdir src out jars
for n in $(seq 200); do echo "public class C$n { public static int f(int x) { return x * $n; } }" >src/C$n.java; done
cat >src/Main.java <<'X'
import java.io.*; import java.nio.*; import java.nio.channels.*; import java.nio.file.*; import java.nio.file.attribute.*; import java.util.*; import java.util.concurrent.*;
import java.util.jar.*; import java.util.stream.*;
public class Main {
  public static void main(String[] a) throws Exception {
    Path w = Path.of(System.getenv("W"));
    int sum = 0;
    for (int n = 1; n <= 200; n++) sum += (int) Class.forName("C" + n).getMethod("f", int.class).invoke(null, 3);
    System.out.println("classes " + sum + " " + new File(Main.class.getProtectionDomain().getCodeSource().getLocation().toURI()).getName());
    int entries = 0; long bytes = 0;
    for (int n = 1; n <= 60; n++) try (JarFile jar = new JarFile(w.resolve("jars/j" + n + ".jar").toFile())) {
      for (JarEntry e : Collections.list(jar.entries())) { entries++; try (InputStream in = jar.getInputStream(e)) { bytes += in.readAllBytes().length > 0 ? 1 : 0; } } }
    System.out.println("jars " + entries + " " + bytes);
    Path m = w.resolve("mapped");
    try (FileChannel c = FileChannel.open(m, StandardOpenOption.CREATE, StandardOpenOption.READ, StandardOpenOption.WRITE)) {
      MappedByteBuffer b = c.map(FileChannel.MapMode.READ_WRITE, 0, 3 << 20);
      for (int i = 0; i < 3 << 20; i += 4) b.putInt(i, i * 31); b.force();
      ByteBuffer r = ByteBuffer.allocate(8); c.read(r, 1 << 20); r.flip(); System.out.println("mapped " + r.getInt() + " " + c.size());
      c.write(ByteBuffer.wrap("through the channel".getBytes()), 4096); byte[] t = new byte[19]; b.position(4096); b.get(t); System.out.println(new String(t));
      try (FileLock l = c.lock(0, 10, false)) { System.out.println("lock " + l.isValid()); try { c.lock(5, 2, false); } catch (OverlappingFileLockException e) { System.out.println("overlaps"); } }
      try (FileChannel d = FileChannel.open(w.resolve("moved"), StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) { System.out.println("sent " + c.transferTo(1000, 2_000_000, d)); }
    }
    System.out.println("sizes " + Files.size(w.resolve("moved")) + " " + Files.mismatch(m, m));
    Path t = Files.createDirectories(w.resolve("t/x/y"));
    ExecutorService pool = Executors.newFixedThreadPool(8); List<Future<Integer>> all = new ArrayList<>();
    for (int k = 0; k < 8; k++) { int id = k; all.add(pool.submit(() -> { int ok = 0; for (int i = 0; i < 150; i++) { Path f = t.resolve(id + "-" + i); Files.writeString(f, "t" + i); if (Files.readString(f).equals("t" + i)) ok++; if (i % 3 == 0) Files.move(f, t.resolve(id + "-" + i + "-moved"), StandardCopyOption.ATOMIC_MOVE); } return ok; })); }
    int ok = 0; for (Future<Integer> f : all) ok += f.get(); pool.shutdown();
    try (Stream<Path> s = Files.walk(w.resolve("t"))) { System.out.println("threads " + ok + " walked " + s.count()); }
    Path p = Files.createTempFile(w, "tmp", null, PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rw-r-----")));
    System.out.println(PosixFilePermissions.toString(Files.getPosixFilePermissions(p)) + " " + Files.getOwner(p));
    Files.setLastModifiedTime(p, FileTime.fromMillis(1234567890123L)); System.out.println("time " + Files.getLastModifiedTime(p).toMillis()); Files.delete(p);
    Files.createSymbolicLink(w.resolve("s"), Path.of("t")); System.out.println("link " + Files.isDirectory(w.resolve("s")) + " " + Files.readSymbolicLink(w.resolve("s")) + " " + Files.isSameFile(w.resolve("s"), w.resolve("t")));
    for (String n : List.of("none", "t")) try { Files.delete(w.resolve(n)); } catch (FileSystemException e) { System.out.println(e.getClass().getSimpleName()); }
    try (RandomAccessFile r = new RandomAccessFile(w.resolve("random").toFile(), "rws")) { r.seek(100_000); r.writeUTF("end"); r.seek(50_000); r.writeLong(7); System.out.println("random " + r.length()); r.setLength(60_000); r.seek(50_000); System.out.println(r.readLong()); }
    try (BufferedWriter o = Files.newBufferedWriter(w.resolve("lines"))) { for (int i = 0; i < 200_000; i++) { o.write("line " + i); o.newLine(); } }
    try (Stream<String> s = Files.lines(w.resolve("lines"))) { System.out.println("lines " + s.mapToInt(String::length).sum()); }
    Process q = new ProcessBuilder("cat").redirectInput(w.resolve("lines").toFile()).redirectOutput(w.resolve("again").toFile()).start(); System.out.println("child " + q.waitFor() + " " + Files.mismatch(w.resolve("lines"), w.resolve("again")));
  }
}
X
javac -d "$W/out" "$W"/src/*.java 2>&1 | grep -v JAVA_TOOL_OPTIONS || true
ls out | wc -l
for n in $(seq 60); do printf '%s\n' "C$n.class" >list; (cd out && zip -q "../jars/j$n.jar" "C$n.class" C1.class) 2>/dev/null || jar --create --file "jars/j$n.jar" -C out "C$n.class" -C out C1.class 2>/dev/null; done
jar --create --file "$W/main.jar" -C "$W/out" . 2>/dev/null
java -cp "$W/main.jar" Main 2>err || { cat err >&2; exit 1; }
cd "$W/out"
java -cp . Main >"$W/second" 2>&1 || true
# Started again, its files are in the way of some of what it makes.
grep -c FileAlreadyExistsException "$W/second" | sed 's/.*/again: it exists/'
echo "jars, maps, channels, locks, threads"
