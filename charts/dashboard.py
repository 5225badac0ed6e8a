# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard of the chart. gen_chart.py writes it to kvferry/files/dashboard.json;
tests/charts/test_dashboard.py asks a Prometheus each of its questions."""

UID = "kvferry"
WIDTH = 24  # of Grafana's grid
HEIGHT = 8  # of a panel
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTOR = '{namespace="$namespace", node=~"$node"}'


def rate(name):
    """A second's worth of a counter, over the nodes shown."""
    return f"sum(rate(kvferry_{name}{SELECTOR}[$__rate_interval]))"


def rate_by(label, name):
    return f"sum by ({label}) (rate(kvferry_{name}{SELECTOR}[$__rate_interval]))"


def increase(name):
    return f"sum(increase(kvferry_{name}{SELECTOR}[$__rate_interval]))"


def total(name, label=None):
    by = f" by ({label})" if label else ""
    return f"sum{by} (kvferry_{name}{SELECTOR})"


def quantile(share, name):
    return f"histogram_quantile({share}, {rate_by('le', name + '_seconds_bucket')})"


def latency(name):
    return [(quantile(0.5, name), "p50"), (quantile(0.99, name), "p99")]


HITS = " + ".join(rate(f"get_hits_{tier}_total")
                  for tier in ("dram", "hbm", "hbm_copied", "nvme", "remote"))

# (row, [(title, unit, stacked, [(question, legend)], what it says)])
ROWS = [
    ("Is it of use?", [
        ("Prompt tokens by source", "short", True,
         [(rate("engine_prompt_tokens_loaded_total"), "loaded from kvferry"),
          (rate("engine_prompt_tokens_cached_total"), "in the engine's own cache"),
          (rate("engine_prompt_tokens_computed_total"), "computed")],
         "A second, as engines report them. What is computed is what a better cache could save."),
        ("Seconds saved, minus spent", "s", False,
         [(f"{rate('engine_saved_seconds_total')} - {rate('engine_spent_seconds_total')}",
           "saved - spent"), (rate("engine_saved_seconds_total"), "saved: prefill not computed"),
          (rate("engine_spent_seconds_total"), "spent: waits for lookups, loads and puts")],
         "A second, as engines report them. Below 0 the cache costs more than it gives."),
        ("Profiles in force", "short", True,
         [(total("profile_clients", "profile"), "{{profile}}")],
         "Clients. Who asks for a profile with loss that calibration has not passed gets exact."),
        ("Prompt chunks found", "percentunit", False,
         [(f"{rate('lookup_hit_chunks_total')} / {rate('lookup_chunks_total')}", "found")],
         "Of the chunks that engines have looked up, those in the leading run that they can load. "
         "What is not found, engines compute."),
        ("Blocks by source", "ops", True,
         [(rate("get_hits_dram_total"), "memory"), (rate("get_hits_nvme_total"), "drive"),
          (f"{rate('get_hits_hbm_total')} + {rate('get_hits_hbm_copied_total')}", "GPU memory"),
          (rate("get_hits_remote_total"), "another node"),
          (rate("get_misses_total"), "miss"), (rate("get_too_slow_total"), "too slow")],
         "Blocks that were asked for, and where they came from. A block is one chunk of one rank."),
        ("Blocks found", "percentunit", False,
         [(f"({HITS}) / ({HITS} + {rate('get_misses_total')})", "found")],
         "After a lookup has said yes this is close to 1; below, blocks have gone meanwhile."),
        ("Traffic", "Bps", False,
         [(rate("get_bytes_total"), "to engines"), (rate("put_bytes_total"), "from engines")],
         "Encoded bytes. A lossy profile carries 3 to 5 times as many bytes of KV."),
        ("Engines attached", "short", False, [(total("clients", "node"), "{{node}}")],
         "0 for long: engines do not find their daemon. helm test tells whether they could."),
        ("Daemons that serve", "short", False,
         [(total("ready"), "ready"), (total("draining"), "draining")],
         "Of the nodes shown."),
    ]),
    ("Tiers", [
        ("How full", "percentunit", False,
         [(f"{total('tier_stored_bytes', 'tier')} / {total('tier_capacity_bytes', 'tier')}",
           "{{tier}}")],
         "Stored bytes of the capacity. Memory and drives are full in normal use: what is coldest "
         "goes."),
        ("Stored", "bytes", True, [(total("tier_stored_bytes", "tier"), "{{tier}}")],
         "Records, with their padding."),
        ("Evictions", "ops", False, [(rate_by("tier", "tier_evictions_total"), "{{tier}}")],
         "Blocks that made room for others. Many in memory and few hits: the arena is too small."),
        ("Given to drives", "ops", True,
         [(rate("nvme_admitted_blocks_total"), "written"),
          (rate("nvme_rejected_blocks_total"), "not admitted"),
          (rate("nvme_dropped_blocks_total"), "dropped: the drive is behind")],
         "Not admitted: write budget and second sight. Dropped for long: the drive is too slow."),
        ("Drive traffic", "Bps", False,
         [(rate_by("node", 'tier_read_bytes_total'), "{{node}} read"),
          (rate_by("node", 'tier_written_bytes_total'), "{{node}} written")],
         "Bytes of drives."),
        ("Waiting for drives", "bytes", False, [(total("writeback_bytes", "node"), "{{node}}")],
         "Write-behind. At put.writeback_share of the arena blocks are dropped."),
    ]),
    ("Latency", [
        ("A block from memory", "s", False, latency("get_dram"),
         "From acceptance to answer, by upper edges of power-of-two buckets."),
        ("A block from a drive", "s", False, latency("get_nvme"), "The same."),
        ("A block from GPU memory", "s", False, latency("get_hbm"), "The same."),
        ("A put", "s", False, latency("put"), "Until the block is stored in memory."),
        ("One read of a drive", "s", False, latency("nvme_read"), "As the daemon sees it."),
        ("One write of a drive", "s", False, latency("nvme_write"), "As the daemon sees it."),
    ]),
    ("Other nodes", [
        ("Links", "short", False, [(total("peers", "node"), "{{node}}")],
         "Nodes whose blocks each one can fetch. 0 where there are others: see kvferry peers."),
        ("Blocks known of others", "short", False, [(total("peer_hints", "node"), "{{node}}")],
         "What others are said to have. At peers.entries the rest is not remembered."),
        ("Traffic between nodes", "Bps", False,
         [(rate_by("node", "peer_fetched_bytes_total"), "{{node}} fetched"),
          (rate_by("node", "peer_served_bytes_total"), "{{node}} served")],
         "Encoded bytes, as they lie in the other node's memory or on its drive."),
        ("A block from another node", "s", False, latency("get_remote"),
         "From acceptance to answer, by upper edges of power-of-two buckets."),
        ("Fetches that brought nothing", "ops", True,
         [(rate("peer_failed_fetches_total"), "no answer in time, or no room"),
          (rate("peer_stale_hints_total"), "the block had gone there"),
          (rate("peer_second_asks_total"), "asked for at a second node")],
         "Of blocks that another node was said to have."),
        ("Links that failed", "short", False,
         [(increase("peer_refused_total"), "refused: key, release or no room"),
          (increase("peer_protocol_errors_total"), "broken protocol"),
          (increase("peer_strangers_total"), "messages under a wrong key"),
          (increase("peer_gaps_total"), "gaps: told anew")],
         "The daemon's log says which node, and why."),
        ("Directory", "short", False,
         [(total("directory_up", "node"), "{{node}} reaches it"),
          (total("directory_nodes", "node"), "{{node}} knows so many nodes")],
         "Where peers.directory is set. Links stay while its server is away."),
    ]),
    ("Clients", [
        ("Busy answers", "ops", False, [(rate_by("node", "requests_busy_total"), "{{node}}")],
         "Requests or blocks that found no room in staging, credits or slots."),
        ("Under lease", "bytes", False, [(total("leased_bytes", "node"), "{{node}}")],
         "What engines hold. It cannot be evicted."),
        ("Staging used", "percentunit", False,
         [(f"{total('staging_used_bytes', 'node')} / {total('staging_total_bytes', 'node')}",
           "{{node}}")], "Memory for puts, given out to clients."),
        ("Who encodes", "short", True,
         [(total("gpu_clients_engine"), "on a GPU, the engine"),
          (total("gpu_clients_agent"), "on a GPU, the daemon's worker"),
          (f"{total('clients')} - {total('gpu_clients_engine')} - {total('gpu_clients_agent')}",
           "CPU, or does not store")], "Clients."),
        ("Attaches", "ops", False,
         [(rate("attaches_total"), "attached"), (rate("attach_refused_total"), "refused"),
          (rate("disconnects_total"), "went away")],
         "Refused: the daemon's log says why."),
        ("GPU workers", "short", False,
         [(total("gpu_workers"), "up"), (total("gpu_engines"), "engines served")],
         "Of the daemon, for engines that cannot host kernels."),
    ]),
    ("What goes wrong", [
        ("Wrong bytes", "short", False,
         [(f"sum by (tier) (increase(kvferry_tier_corrupt_total{SELECTOR}[$__rate_interval]))",
           "{{tier}} checksum"),
          (f"sum by (tier) (increase(kvferry_tier_mac_errors_total{SELECTOR}[$__rate_interval]))",
           "{{tier}} MAC"),
          (increase("put_corrupt_total"), "puts"),
          (increase("dram_corrupt_blocks_total"), "dram, by verify"),
          (increase("peer_corrupt_blocks_total"), "other nodes"),
          (increase("engine_corrupt_blocks_total"), "engines, when decoding")],
         "Each was a miss, none was served. More than a few: replace the drive."),
        ("Late and too slow", "ops", True,
         [(f"{rate('get_too_slow_total')} - {rate('get_too_slow_queue_total')} - "
           f"{rate('get_too_slow_remote_total')}", "the drive alone takes too long"),
          (rate("get_too_slow_queue_total"), "too much before it"),
          (rate("get_too_slow_remote_total"), "another node takes too long"),
          (rate("get_late_total"), "begun, and not there in time")],
         "Blocks that were here and could not be had within an engine's budget: misses."),
        ("Reported by engines", "ops", False,
         [(rate("engine_load_failures_total"), "loads that failed"),
          (rate("engine_taint_refusals_total"), "puts left out: they follow from lossy blocks")],
         "Blocks. A load that fails is computed again."),
        ("Drift", "percentunit", False,
         [(f"{rate('engine_drift_error_ppm_total')} / 1e6 / "
           f"clamp_min({rate('engine_drift_chunks_total')}, 1e-9)", "relative error")],
         "Blocks computed again, beside what is stored of them: mean of the relative errors."),
        ("Oldest lease", "s", False, [(total("lease_oldest_seconds", "node"), "{{node}}")],
         "At lease.max_age its client is disconnected."),
        ("Incomplete sets", "short", False, [(total("incomplete_sets", "node"), "{{node}}")],
         "Some of their shards have not come: one rank puts less than the others."),
        ("Errors of drives", "short", False,
         [(f"sum by (node) (increase(kvferry_nvme_io_errors_total{SELECTOR}[$__rate_interval]))",
           "{{node}}")], "Reads and writes that failed."),
        ("Tiers switched off", "short", False,
         [(total("tier_off", "tier"), "{{tier}} off"),
          (total("tier_writes_off", "tier"), "{{tier}} writes off")],
         "A drive with too many errors is not written any more, then not read."),
        ("Broken protocol, lost leases", "short", False,
         [(f"sum by (node) (increase(kvferry_protocol_errors_total{SELECTOR}[$__rate_interval]))",
           "{{node}} protocol"),
          (f"sum by (node) (increase(kvferry_leases_lost_total{SELECTOR}[$__rate_interval]))",
           "{{node}} leases")],
         "Clients disconnected for what they sent, or for what they held too long."),
        ("Conflicting puts", "short", False,
         [(f"sum(increase(kvferry_put_conflict_total{SELECTOR}[$__rate_interval]))", "conflicts"),
          (f"sum(increase(kvferry_put_mismatch_total{SELECTOR}[$__rate_interval]))",
           "not the client's format")],
         "A key that holds another payload: engines that compute otherwise share a namespace."),
        ("Reactor busy", "percentunit", False,
         [(f"{rate_by('node', 'loop_busy_seconds_total')} / "
           f"({rate_by('node', 'loop_busy_seconds_total')} + "
           f"{rate_by('node', 'loop_idle_seconds_total')})", "{{node}}")],
         "The one thread that everything goes through. Near 1 for long: fewer, larger blocks."),
    ]),
]


def panel(number, title, unit, stacked, questions, about, place):
    least = {} if "minus" in title else {"min": 0}
    return {
        "id": number, "type": "timeseries", "title": title, "description": about,
        "datasource": SOURCE, "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, **least, "custom": {
            "fillOpacity": 30 if stacked else 0,
            "stacking": {"mode": "normal" if stacked else "none"}}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"},
                    "tooltip": {"mode": "multi"}},
        "targets": [{"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": question,
                     "legendFormat": legend} for i, (question, legend) in enumerate(questions)],
    }


def variable(name, label, question):
    return {"name": name, "label": label, "type": "query", "datasource": SOURCE,
            "query": {"query": question, "refId": name}, "refresh": 2, "sort": 1}


def make_panels():
    number, top = 0, 0
    for row, panels in ROWS:
        number += 1
        yield {"id": number, "type": "row", "title": row, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}}
        top += 1
        for i, one in enumerate(panels):
            number += 1
            width = WIDTH // 3
            yield panel(number, *one, {"x": i % 3 * width, "y": top + i // 3 * HEIGHT, "w": width,
                                       "h": HEIGHT})
        top += -(-len(panels) // 3) * HEIGHT


def make_dashboard():
    return {
        "uid": UID, "title": "kvferry", "tags": ["kvferry"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "30s", "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource",
             "query": "prometheus"},
            variable("namespace", "Namespace", "label_values(kvferry_build_info, namespace)"),
            {**variable("node", "Node",
                        'label_values(kvferry_build_info{namespace="$namespace"}, node)'),
             "multi": True, "includeAll": True, "allValue": ".*"},
        ]},
        "panels": list(make_panels()),
    }
