// Rows are part of the component's template, which is compiled once: Vue patches them in place, by
// the job's id, so that a row under the pointer stays there while its numbers change.
export default {
  props: { columns: Array, mount: String, spark: String },
  template: `
<q-table :columns="columns">
  <template v-slot:header-selection="props">
    <q-checkbox v-model="props.selected" dense size="sm" aria-label="Select all jobs of this page" />
  </template>
  <template v-slot:body="props">
    <q-tr :props="props" :key="props.key" class="job-row" :title="props.row.message">
      <q-td auto-width class="job-select"><q-checkbox v-model="props.selected" dense size="sm" :aria-label="'Select ' + props.row.name" /></q-td>
      <template v-for="{ name, label, align } in props.cols" :key="name">
        <q-td v-if="name === 'status'" class="job-status"><span :class="'status tone-' + props.row.tone">{{ props.row.status }}</span><small v-if="props.row.groups" class="degraded">{{ props.row.groups }}</small></q-td>
        <q-td v-else-if="name === 'name'" class="job-name">
          <a :href="mount + '/jobs/' + props.row.id">{{ props.row.name }}</a><small>{{ props.row.id }}</small>
        </q-td>
        <q-td v-else-if="name === 'progress'" class="job-progress">
          <div :class="'bar tone-' + props.row.tone"><i :style="{width: props.row.percent + '%'}"></i></div>
          <div class="bar-text"><span>{{ props.row.percent_text }}</span><span>{{ props.row.aside }}</span></div>
        </q-td>
        <q-td v-else-if="name === 'spark'" :data-label="props.row.spark ? label : null" class="job-spark"><svg v-if="props.row.spark" :viewBox="spark" aria-hidden="true"><path :d="props.row.spark" /></svg></q-td>
        <q-td v-else-if="name === 'quality'" class="number" :data-label="label">
          {{ props.row.quality }}<small class="unit">{{ props.row.quality_name }}</small>
        </q-td>
        <q-td v-else :data-label="props.row[name] === '' ? null : label" :class="align === 'right' ? 'number' : 'text'">{{ props.row[name] }}</q-td>
      </template>
    </q-tr>
  </template>
</q-table>
`,
};
