-- The wheel: cycles and their stages, the pool, samples that link runs to cycles, adapters.
-- The row is the job here too: a cycle is claimed under a lease with a fence.

CREATE TABLE flywheel.cycles (
    tenant_id   text NOT NULL,
    id          text NOT NULL,
    domain      text NOT NULL,
    date        date NOT NULL,
    turn        integer NOT NULL DEFAULT 0,
    trigger     text NOT NULL,
    recipe      jsonb NOT NULL,
    options     jsonb NOT NULL DEFAULT '{}',
    state       text NOT NULL DEFAULT 'running',
    outcome     text,
    reason      text,
    stop_requested boolean NOT NULL DEFAULT false,
    resume_at   timestamptz,
    lease_owner text,
    lease_until timestamptz,
    fence       bigint NOT NULL DEFAULT 0,
    created_at  timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    PRIMARY KEY (tenant_id, id),
    UNIQUE (tenant_id, domain, date, turn)
);
-- At most one cycle of a domain turns at a time.
CREATE UNIQUE INDEX cycles_running ON flywheel.cycles (tenant_id, domain) WHERE state = 'running';

CREATE TABLE flywheel.stages (
    tenant_id   text NOT NULL,
    cycle_id    text NOT NULL,
    seq         integer NOT NULL,
    name        text NOT NULL,
    round       integer NOT NULL DEFAULT 0,
    state       text NOT NULL DEFAULT 'pending',
    attempts    integer NOT NULL DEFAULT 0,
    inputs      jsonb NOT NULL DEFAULT '{}',
    outputs     jsonb NOT NULL DEFAULT '{}',
    metrics     jsonb NOT NULL DEFAULT '{}',
    progress    jsonb NOT NULL DEFAULT '{}',
    reason      text,
    started_at  timestamptz,
    finished_at timestamptz,
    PRIMARY KEY (tenant_id, cycle_id, seq),
    FOREIGN KEY (tenant_id, cycle_id) REFERENCES flywheel.cycles ON DELETE CASCADE
);

-- Feedback that a cycle has looked at.
CREATE TABLE flywheel.mined (
    tenant_id text NOT NULL,
    run_id    text NOT NULL,
    seq       integer NOT NULL,
    cycle_id  text NOT NULL,
    category  text NOT NULL,
    PRIMARY KEY (tenant_id, run_id, seq)
);

CREATE TABLE flywheel.pool_tasks (
    tenant_id      text NOT NULL,
    id             text NOT NULL,
    domain         text NOT NULL,
    domain_digest  text NOT NULL,
    origin         text NOT NULL,
    source_run     text,
    source_by      text NOT NULL DEFAULT '',
    split          text NOT NULL,
    task           jsonb NOT NULL,
    expectation    jsonb,
    content_digest text NOT NULL,
    snapshot       text,
    status         text NOT NULL DEFAULT 'pending',
    reason         text,
    demonstration  jsonb,
    cycle_id       text,
    fixed_by       text,
    created_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id),
    UNIQUE (tenant_id, domain, content_digest)
);
CREATE INDEX pool_tasks_by_status ON flywheel.pool_tasks (tenant_id, domain, status, split);

CREATE TABLE flywheel.pool_files (
    tenant_id text NOT NULL,
    task_id   text NOT NULL,
    path      text NOT NULL,
    content   bytea NOT NULL,
    PRIMARY KEY (tenant_id, task_id, path),
    FOREIGN KEY (tenant_id, task_id) REFERENCES flywheel.pool_tasks ON DELETE CASCADE
);

-- Which run answered which request of a cycle: (stage, arm, task, member) is sampled once.
CREATE TABLE flywheel.samples (
    tenant_id text NOT NULL,
    cycle_id  text NOT NULL,
    stage_seq integer NOT NULL,
    arm       text NOT NULL,
    task_id   text NOT NULL,
    member    integer NOT NULL,
    replaces  text,
    run_id    text NOT NULL,
    PRIMARY KEY (tenant_id, cycle_id, stage_seq, arm, task_id, member, run_id),
    FOREIGN KEY (tenant_id, cycle_id) REFERENCES flywheel.cycles ON DELETE CASCADE
);
CREATE INDEX samples_by_run ON flywheel.samples (tenant_id, run_id);

CREATE TABLE flywheel.adapters (
    tenant_id  text NOT NULL,
    name       text NOT NULL,
    digest     text NOT NULL,
    base       text NOT NULL,
    domain     text NOT NULL,
    folder     text NOT NULL,
    stage      text NOT NULL,
    cycle_id   text,
    status     text NOT NULL DEFAULT 'candidate',
    loaded     boolean NOT NULL DEFAULT false,
    manifest   jsonb NOT NULL,
    decision   jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, name),
    UNIQUE (tenant_id, domain, digest)
);
